//! How many jobs run at once.

use std::fs::File;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::places;

/// Jobs at once over all test threads and processes: two where there are two cores, the smallest machine that we test on.
fn num_slots() -> usize {
    thread::available_parallelism().map_or(2, usize::from).div_ceil(2).max(2)
}

/// Waits for one of the slots; the lock goes with the file. Files and not a semaphore, so that a runner which starts a
/// process a test is held to the same number.
pub fn take_slot() -> File {
    let num_slots = num_slots();
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let first = std::process::id() as usize + NEXT.fetch_add(1, Ordering::Relaxed);
    let mut slots: Vec<File> = (0..num_slots)
        .map(|slot| {
            let path = places::temporary().join(format!("ranks-slot-{slot}"));
            File::create(&path).unwrap_or_else(|error| panic!("cannot create {}: {error}", path.display()))
        })
        .collect();
    let mine = (0..num_slots)
        .map(|step| (first + step) % num_slots)
        .find(|&slot| slots[slot].try_lock().is_ok())
        .unwrap_or_else(|| {
            let slot = first % num_slots;
            slots[slot].lock().expect("a slot can be locked");
            slot
        });
    slots.swap_remove(mine)
}
