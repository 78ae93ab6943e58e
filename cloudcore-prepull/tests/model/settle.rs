//! The end of a run: the faults stop, and every job must end.

use crate::check::Check;
use crate::cloud::{Boot, DispatchFate, Fate};
use crate::world::World;

/// Rounds of [`World::settle`]: in each, everything that is due is done, and time moves to the next moment at which
/// something is due. A job may have six nodes, one at a time, with rounds and pauses.
const ROUNDS: usize = 3_000;
/// How many of the faults in [`World::last_fault`] still happen after the others have stopped.
const LAST_FAULTS: u32 = 4;
/// By then, in milliseconds, every write that had failed has been made again.
const WRITTEN: u64 = 7_000;

impl World {
    pub(crate) fn settle(&mut self) {
        self.log(|| "---- the faults stop".to_owned());
        self.calm = true;
        self.ghosts.clear();
        if !self.api.overtaken.is_empty() || !self.api.overtaken_runs.is_empty() {
            // The leader may have no reason to write such a report again, and the next one reads it as it is.
            self.restart_cloud();
        }
        self.quiet();
        self.check_edges_work_for_the_cloud();
        if self.rng.chance(35) {
            self.delete_one_that_runs();
            self.quiet();
            self.check_edges_work_for_the_cloud();
        }
        self.release_jobs();
        let begun = self.now;
        let mut last = LAST_FAULTS;
        for _ in 0..ROUNDS {
            self.quiet();
            if last > 0 && self.rng.chance(10) {
                last -= 1;
                self.last_fault();
                self.quiet();
            }
            if self.now > begun + WRITTEN {
                self.check_nodes_have_their_tasks();
            }
            if self.over() {
                break;
            }
            match self.next_moment() {
                Some(next) => self.now = next,
                // The deadlines of running tasks are not among these moments.
                None => self.now += 1_000,
            }
            self.tick_edges();
        }
        self.check_edges_work_for_the_cloud();
        self.check.settled(&self.api, self.now);
        for edge in &self.edges {
            Check::pins(&self.api, edge);
            assert!(edge.disk.is_empty(), "{} keeps {:?}", edge.node, edge.disk.keys());
            assert!(edge.agent.is_empty() && edge.execs.is_empty(), "{} is not done", edge.node);
        }
    }

    /// Deletes a job that edges work on, while they are connected or while none of them is.
    fn delete_one_that_runs(&mut self) {
        let tasks = self.edges.iter().flat_map(|edge| edge.execs.keys());
        let Some(job) = tasks.map(|task| task.job.clone()).find(|job| self.api.jobs.contains_key(job)) else {
            return self.delete_some();
        };
        if self.rng.chance(50) {
            self.delete_job(&job);
            return;
        }
        for id in self.conns.keys().copied().collect::<Vec<_>>() {
            self.cut(id);
            self.notice(id, true);
            self.notice(id, false);
        }
        self.delete_job(&job);
        while self.cloud.read_watch(0) {}
        self.run_cloud(usize::MAX);
    }

    /// What random steps seldom do at the worst moment: an edge is killed when it has pulled some of the images of a
    /// task, a task arrives twice while it is being carried out, another leader takes over, a report is deleted, or a
    /// job is edited that is in the middle of its course or has ended.
    fn last_fault(&mut self) {
        match self.rng.below(8) {
            0 => match self.half_done() {
                Some(edge) => self.restart_edge(edge, 0),
                None => self.assign_again(),
            },
            1 => self.assign_again(),
            2 => self.restart_cloud(),
            3 => self.delete_report(),
            _ => {
                self.edit_without_suspension();
                if self.rng.chance(50) {
                    self.quiet();
                    self.restart_cloud();
                }
            }
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

    /// Does everything that can happen at this moment, until nothing is left to do.
    fn quiet(&mut self) {
        for _ in 0..10_000 {
            let mut moved = false;
            for id in self.conns.keys().copied().collect::<Vec<_>>() {
                self.notice(id, true);
                self.notice(id, false);
                self.welcome(id);
                while self.reach_edge(id) {
                    moved = true;
                }
                while self.reach_cloud(id) {
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
                || !self.cloud.recalls.is_empty()
                || self.cloud.boot != Boot::Up;
            while !self.cloud.writes.is_empty() {
                self.finish_write(0, Fate::Answered);
            }
            while !self.cloud.dispatches.is_empty() {
                self.finish_dispatch(0, DispatchFate::Sent);
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
        panic!("there is always something left to do");
    }

    /// Checks that every edge has the task of its node in progress, unless it is unknown what the node is to pull: its
    /// Node was deleted, or the job was edited in a way that it cannot follow.
    fn check_nodes_have_their_tasks(&self) {
        for job in self.api.jobs.keys().filter(|job| self.is_followed(job)) {
            for edge in self.edges.iter().filter(|edge| !self.deleted.contains(&edge.node)) {
                self.check.works(&self.api, job, edge, self.now);
            }
        }
    }

    fn check_edges_work_for_the_cloud(&self) {
        for edge in &self.edges {
            for task in edge.execs.keys() {
                self.check.wanted(&self.api, edge, task);
            }
        }
    }
}
