//! Work on all cores with results in order, and with a bound on the memory of what is at work or waits for its turn.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::Resources;

/// Jobs that may be ahead of the one that is taken: even those without cost have a size.
const AHEAD: usize = 4096;

struct PoolState<R> {
    /// The next job to begin with.
    next: usize,
    /// The next result to take.
    taken: usize,
    /// The cost of all jobs between.
    cost: u64,
    results: BTreeMap<usize, R>,
    /// Nothing further begins: something has failed.
    stopped: bool,
}

struct Pool<R> {
    state: Mutex<PoolState<R>>,
    changed: Condvar,
}

impl<R> Pool<R> {
    fn state(&self) -> MutexGuard<'_, PoolState<R>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, PoolState<R>>) -> MutexGuard<'a, PoolState<R>> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}

/// Stops all when it's dropped early: a thread that panics must not leave others waiting for its result.
struct StopOnPanic<'a, R>(&'a Pool<R>);

impl<R> Drop for StopOnPanic<'_, R> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.state().stopped = true;
            self.0.changed.notify_all();
        }
    }
}

/// Does the work of each job, and hands the results over in the order of the jobs. A job begins when the cost of all that
/// were begun and not yet taken leaves room for it, or when there are none.
pub(super) fn in_order<J: Sync, R: Send, E>(
    jobs: &[J],
    settings: &Resources,
    cost: impl Fn(&J) -> u64 + Sync,
    work: impl Fn(&J) -> R + Sync,
    mut take: impl FnMut(&J, R) -> Result<(), E>,
) -> Result<(), E> {
    let state = PoolState { next: 0, taken: 0, cost: 0, results: BTreeMap::new(), stopped: false };
    let pool = Pool { state: Mutex::new(state), changed: Condvar::new() };
    let (pool, cost, work) = (&pool, &cost, &work);
    let worker = || {
        let _stop = StopOnPanic(pool);
        let mut state = pool.state();
        while !state.stopped && state.next < jobs.len() {
            let number = state.next;
            let costs = cost(&jobs[number]);
            // In this order: the job that is taken next has begun before any that could use up the room.
            let has_room = state.cost + costs <= settings.memory && number - state.taken < AHEAD;
            if !has_room && number != state.taken {
                state = pool.wait(state);
                continue;
            }
            state.next += 1;
            state.cost += costs;
            drop(state);
            let result = work(&jobs[number]);
            state = pool.state();
            state.results.insert(number, result);
            pool.changed.notify_all();
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..settings.threads.max(1) {
            scope.spawn(worker);
        }
        let _stop = StopOnPanic(pool);
        for (number, job) in jobs.iter().enumerate() {
            let mut state = pool.state();
            let result = loop {
                match state.results.remove(&number) {
                    Some(result) => break result,
                    // The scope passes the panic on.
                    None if state.stopped => return Ok(()),
                    None => state = pool.wait(state),
                }
            };
            drop(state);
            let taken = take(job, result);
            let mut state = pool.state();
            state.taken = number + 1;
            state.cost -= cost(job);
            state.stopped = taken.is_err();
            pool.changed.notify_all();
            drop(state);
            taken?;
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn results_come_in_order_within_the_memory() {
        let jobs: Vec<u64> = (0..500).map(|n| n * 7919 % 13).collect();
        let (at_once, most) = (AtomicU64::new(0), AtomicU64::new(0));
        let mut taken = Vec::new();
        let settings = Resources { threads: 4, memory: 20 };
        let done: Result<(), ()> = in_order(
            &jobs,
            &settings,
            |job| *job,
            |job| {
                let now = at_once.fetch_add(*job, Ordering::SeqCst) + job;
                most.fetch_max(now, Ordering::SeqCst);
                job * 2
            },
            |job, result| {
                at_once.fetch_sub(*job, Ordering::SeqCst);
                taken.push(result);
                Ok(())
            },
        );
        assert_eq!(done, Ok(()));
        assert_eq!(taken, jobs.iter().map(|job| job * 2).collect::<Vec<_>>());
        assert!(most.into_inner() <= 20);
    }

    #[test]
    fn a_job_above_the_memory_runs_alone() {
        let settings = Resources { threads: 2, memory: 1 };
        let mut sum = 0;
        let done: Result<(), ()> = in_order(
            &[5, 6, 7],
            &settings,
            |job| *job,
            |job| *job,
            |_, result| {
                sum += result;
                Ok(())
            },
        );
        assert_eq!((done, sum), (Ok(()), 18));
    }

    #[test]
    fn an_error_ends_the_work() {
        let settings = Resources { threads: 2, memory: 100 };
        let done = in_order(
            &[1, 2, 3],
            &settings,
            |job| *job,
            |job| *job,
            |_, result| {
                if result == 2 { Err("two") } else { Ok(()) }
            },
        );
        assert_eq!(done, Err("two"));
    }
}
