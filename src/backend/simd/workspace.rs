//! Buffers between gathering, FC1 and FC2, kept by the backend: layers share them, and no call pays for fresh pages.

use std::sync::{Mutex, PoisonError};

use super::kernels::Lane;

/// The buffers of one call.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    input: Vec<Lane>,
    inner: Vec<Lane>,
}

impl Buffers {
    /// FC1's input and FC2's input, of so many lanes each; the contents are whatever was there.
    pub(super) fn get(&mut self, input_len: usize, inner_len: usize) -> (&mut [Lane], &mut [Lane]) {
        (grown(&mut self.input, input_len), grown(&mut self.inner, inner_len))
    }

    fn len(&self) -> usize {
        self.input.len() + self.inner.len()
    }
}

fn grown(buffer: &mut Vec<Lane>, len: usize) -> &mut [Lane] {
    if buffer.len() < len {
        buffer.resize(len, Lane::default());
    }
    &mut buffer[..len]
}

/// The largest buffers returned so far. Calls that overlap bring their own.
#[derive(Debug, Default)]
pub(super) struct Workspace(Mutex<Buffers>);

impl Workspace {
    /// Lends the buffers to `work`.
    pub(super) fn lend<T>(&self, work: impl FnOnce(&mut Buffers) -> T) -> T {
        let mut buffers = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let result = work(&mut buffers);
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < buffers.len() {
            *kept = buffers;
        }
        result
    }
}
