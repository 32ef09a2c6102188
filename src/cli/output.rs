//! The only door to standard output and standard error.
//!
//! Results go to standard output, everything else to standard error. Where the reader of standard output has gone
//! (`lockstep ... | head -1`), what follows is dropped and the command goes on to its own exit code: a rank that
//! stopped there would leave its peers waiting.

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{MultiProgress, ProgressDrawTarget, TermLike};
use serde::Serialize;

use super::values::ProgressChoice;
use crate::exit::{Classify, Exit};

/// Bars are drawn so often where standard error is a pipe, whose other end may be slow.
const PIPE_DRAWS_PER_S: u8 = 4;

/// Set once standard output's reader has gone.
static IS_CLOSED: AtomicBool = AtomicBool::new(false);
/// Bars on the screen, which lines to standard error must not be written through.
static BARS: OnceLock<MultiProgress> = OnceLock::new();

/// Why something could not be printed.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// Standard output does not take what is written, and not because its reader has gone.
    #[error("cannot write to standard output")]
    Write {
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// A value that has no JSON form.
    #[error("cannot write the result as JSON")]
    Json {
        /// Why.
        #[source]
        source: serde_json::Error,
    },
}

impl Classify for OutputError {
    fn exit(&self) -> Exit {
        match self {
            Self::Write { .. } => Exit::Environment,
            Self::Json { .. } => Exit::Bug,
        }
    }
}

/// Writes `text` and a newline to `out`; true where the reader has gone.
fn write_line(out: &mut impl Write, text: &str) -> Result<bool, OutputError> {
    match out.write_all(text.as_bytes()).and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()) {
        Ok(()) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(true),
        Err(source) => Err(OutputError::Write { source }),
    }
}

/// Prints a line, or several, to standard output.
///
/// # Errors
/// If standard output cannot be written, other than because its reader has gone.
pub fn line(text: impl Display) -> Result<(), OutputError> {
    if is_closed() {
        return Ok(());
    }
    if write_line(&mut io::stdout().lock(), &text.to_string())? {
        IS_CLOSED.store(true, Ordering::Relaxed);
    }
    Ok(())
}

/// Prints one JSON value to standard output.
///
/// # Errors
/// As [`line()`]; or if the value has no JSON form.
pub fn json(value: &impl Serialize) -> Result<(), OutputError> {
    line(serde_json::to_string_pretty(value).map_err(|source| OutputError::Json { source })?)
}

/// Whether standard output's reader has gone, so that a long command may stop early.
#[must_use]
pub fn is_closed() -> bool {
    IS_CLOSED.load(Ordering::Relaxed)
}

/// Writes a line to standard error, above any bar.
pub fn note(text: impl Display) {
    let _ = LogWriter.write(format!("{text}\n").as_bytes());
}

/// Where bars are drawn; `None`: nowhere.
pub(super) fn bar_target(choice: ProgressChoice) -> Option<ProgressDrawTarget> {
    match (choice, io::stderr().is_terminal()) {
        (ProgressChoice::Auto | ProgressChoice::Always, true) => Some(ProgressDrawTarget::stderr()),
        (ProgressChoice::Always, false) => {
            Some(ProgressDrawTarget::term_like_with_hz(Box::new(Pipe), PIPE_DRAWS_PER_S))
        }
        (ProgressChoice::Never, _) | (ProgressChoice::Auto, false) => None,
    }
}

/// Tells this door of the bars that it has to write around; the first caller's stand.
pub(super) fn write_around(bars: &MultiProgress) {
    let _ = BARS.set(bars.clone());
}

/// Standard error for log lines; each write is one whole line. It never fails: nothing could be said about it.
#[derive(Debug, Clone, Copy)]
pub(super) struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let write = || io::stderr().lock().write_all(line);
        // Where the reader has gone (`lockstep ... 2>&1 | head -1`) the line is dropped. As an error it would come back:
        // the log says that it can't log, and where that can't be said either it panics.
        let _ = BARS.get().map_or_else(write, |bars| bars.suspend(write));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().lock().flush()
    }
}

/// Standard error as a terminal of fixed size behind a pipe: `mpirun` hands what ranks write to its own terminal.
#[derive(Debug)]
struct Pipe;

impl Pipe {
    fn put(&self, text: &str) -> io::Result<()> {
        io::stderr().lock().write_all(text.as_bytes())
    }

    fn move_cursor(&self, n: usize, direction: char) -> io::Result<()> {
        if n == 0 { Ok(()) } else { self.put(&format!("\x1b[{n}{direction}")) }
    }
}

impl TermLike for Pipe {
    fn width(&self) -> u16 {
        79
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'A')
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'B')
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'C')
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.move_cursor(n, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.put(&format!("{text}\n"))
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.put(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        self.put("\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        io::stderr().lock().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Refusing(io::ErrorKind);

    impl Write for Refusing {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_gone_reader_is_no_error_and_a_full_disk_is() {
        assert!(write_line(&mut Refusing(io::ErrorKind::BrokenPipe), "x").expect("quiet"));
        let error = write_line(&mut Refusing(io::ErrorKind::StorageFull), "x").expect_err("said");
        assert_eq!(error.exit(), Exit::Environment);
        let mut written = Vec::new();
        assert!(!write_line(&mut written, "a\nb").expect("written"));
        assert_eq!(written, b"a\nb\n");
    }
}
