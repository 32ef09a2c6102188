//! How many jobs run at once.

use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Jobs at once over all test threads and processes: the smallest machine we test on has two cores.
const NUM_SLOTS: usize = 2;

/// Waits for one of the slots; the lock goes with the file. Files and not a semaphore, so that a runner which starts a
/// process a test is held to the same number.
pub fn take_slot() -> File {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let first = std::process::id() as usize + NEXT.fetch_add(1, Ordering::Relaxed);
    let mut slots: Vec<File> = (0..NUM_SLOTS)
        .map(|slot| {
            let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("ranks-slot-{slot}"));
            File::create(&path).unwrap_or_else(|error| panic!("cannot create {}: {error}", path.display()))
        })
        .collect();
    let mine = (0..NUM_SLOTS)
        .map(|step| (first + step) % NUM_SLOTS)
        .find(|&slot| slots[slot].try_lock().is_ok())
        .unwrap_or_else(|| {
            let slot = first % NUM_SLOTS;
            slots[slot].lock().expect("a slot can be locked");
            slot
        });
    slots.swap_remove(mine)
}
