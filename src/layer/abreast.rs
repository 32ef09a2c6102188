//! A few experts at a time: what threads do side by side, with the outcome of doing it one by one.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use rayon::ThreadPool;

/// Experts that are read and packed at a time, which bounds what is mapped beside what is packed. Threads beyond that help
/// to pack them.
const MAX_ABREAST: usize = 16;

/// Does `work` for `0..num`, in that order but up to [`MAX_ABREAST`] at a time, on the threads of `pool`. Nothing is begun
/// behind an index that failed.
///
/// # Errors
/// That of the lowest index that fails, whichever thread found one first.
pub(super) fn abreast<T: Send + Sync, E: Send>(
    pool: &ThreadPool,
    num: usize,
    work: impl Fn(usize) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let done: Vec<OnceLock<T>> = (0..num).map(|_| OnceLock::new()).collect();
    let next = AtomicUsize::new(0);
    let failed: Mutex<Option<(usize, E)>> = Mutex::new(None);
    let fail = |index: usize, error: E| {
        // Whoever is at an index below goes on; nobody takes another.
        next.fetch_max(num, Ordering::Relaxed);
        let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
        if failed.as_ref().is_none_or(|(lowest, _)| index < *lowest) {
            *failed = Some((index, error));
        }
    };
    // A broadcast, so that no thread takes up another's loop while it waits for a part of its own.
    pool.broadcast(|context| {
        while context.index() < MAX_ABREAST {
            // Indices are taken in order: when one fails, all below it have been taken.
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= num {
                break;
            }
            match work(index) {
                Ok(value) => drop(done[index].set(value)),
                Err(error) => fail(index, error),
            }
        }
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some((_, error)) => Err(error),
        None => Ok(done.into_iter().filter_map(OnceLock::into_inner).collect()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use rayon::ThreadPoolBuilder;

    use super::*;

    fn pool(num_threads: usize) -> ThreadPool {
        ThreadPoolBuilder::new().num_threads(num_threads).build().unwrap()
    }

    #[test]
    fn results_come_in_order_and_few_are_at_work() {
        let (at_work, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let pool = pool(3 * MAX_ABREAST);
        let squares = abreast(&pool, 100, |index| {
            most.fetch_max(at_work.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::yield_now();
            at_work.fetch_sub(1, Ordering::SeqCst);
            Ok::<_, ()>(index * index)
        });
        assert_eq!(squares.unwrap(), (0..100).map(|index| index * index).collect::<Vec<_>>());
        assert!(most.into_inner() <= MAX_ABREAST);
        assert_eq!(abreast(&pool, 0, |_| Ok::<_, ()>(1)), Ok(Vec::new()));
    }

    /// Threads that fail at once: the one of the lowest index is heard, and those behind are not begun.
    #[test]
    fn the_lowest_failure_is_the_one_of_all() {
        for num_threads in [1, 2, 4] {
            let pool = pool(num_threads);
            for _ in 0..50 {
                let (together, begun) = (Barrier::new(num_threads), AtomicUsize::new(0));
                let outcome: Result<Vec<()>, usize> = abreast(&pool, 100, |index| {
                    begun.fetch_max(index, Ordering::SeqCst);
                    if (8..8 + num_threads).contains(&index) {
                        together.wait();
                        return Err(index);
                    }
                    Ok(())
                });
                assert_eq!(outcome, Err(8));
                assert!(begun.into_inner() < 8 + 2 * num_threads);
            }
        }
    }
}
