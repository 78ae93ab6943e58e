//! The faults stop, and everything comes to its end.

use crate::cloud::Boot;
use crate::world::{Fate, World};

/// In each of which everything that is due is done and time moves on to the next thing. A job may have six
/// nodes, one at a time, with rounds and pauses.
const ROUNDS: usize = 3_000;

impl World {
    pub(crate) fn settle(&mut self) {
        self.log(|| "---- the faults stop".to_owned());
        self.calm = true;
        self.ghosts.clear();
        self.quiet();
        self.nobody_works_in_vain();
        self.let_go();
        for _ in 0..ROUNDS {
            self.quiet();
            if self.over() {
                break;
            }
            match self.next_moment() {
                Some(next) => self.now = next,
                // Deadlines of tasks that run are not among the moments.
                None => self.now += 1_000,
            }
            self.tick_edges();
        }
        self.nobody_works_in_vain();
        self.check.settled(&self.api);
        for edge in &self.edges {
            assert!(edge.disk.is_empty(), "{} keeps {:?}", edge.node, edge.disk.keys());
            assert!(edge.agent.is_empty() && edge.execs.is_empty(), "{} is not done", edge.node);
        }
    }

    fn over(&self) -> bool {
        let jobs = self.api.jobs.values().all(|stored| {
            let status = stored.object.status.as_ref();
            status.is_some_and(|status| {
                status.observed_generation == stored.object.metadata.generation
                    && (status.completion_time.is_some() || status.start_time.is_none())
            })
        });
        jobs && self.edges.iter().all(|edge| edge.disk.is_empty() && edge.agent.is_empty())
            && self.cloud.controller.next_wakeup().is_none()
    }

    /// All that can happen at this moment happens.
    fn quiet(&mut self) {
        for _ in 0..10_000 {
            let mut moved = false;
            for id in self.conns.keys().copied().collect::<Vec<_>>() {
                self.notice(id, true);
                self.notice(id, false);
                self.welcome(id);
                while self.to_edge(id) {
                    moved = true;
                }
                while self.to_cloud(id) {
                    moved = true;
                }
            }
            for edge in 0..self.edges.len() {
                if self.edges[edge].conn.is_none() {
                    self.dial(edge);
                    moved = true;
                }
                while self.write_record(edge, true) {
                    moved = true;
                }
                for task in self.edges[edge].execs.keys().cloned().collect::<Vec<_>>() {
                    moved |= self.carry_out_task(edge, &task);
                }
            }
            while self.cloud.read_watch(1) || self.cloud.read_watch(0) {
                moved = true;
            }
            moved |= !self.cloud.writes.is_empty()
                || !self.cloud.dispatches.is_empty()
                || !self.cloud.deletes.is_empty()
                || !self.cloud.inputs.is_empty()
                || self.cloud.boot != Boot::Up;
            while !self.cloud.writes.is_empty() {
                self.finish_write(0, Fate::Answered);
            }
            while !self.cloud.dispatches.is_empty() {
                self.finish_dispatch(0, false);
            }
            while !self.cloud.deletes.is_empty() {
                self.finish_delete(0);
            }
            self.collect_garbage();
            self.run_cloud(usize::MAX);
            if !moved
                && self.cloud.writes.is_empty()
                && self.cloud.dispatches.is_empty()
                && self.cloud.deletes.is_empty()
            {
                return;
            }
        }
        panic!("it never becomes quiet");
    }

    fn nobody_works_in_vain(&self) {
        for edge in &self.edges {
            for task in edge.execs.keys() {
                self.check.wanted(&self.api, edge, task);
            }
        }
    }
}
