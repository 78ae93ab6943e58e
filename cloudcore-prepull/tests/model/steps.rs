//! The random steps: what may happen at any moment.

use edgecore_prepull::tasks::agent::{AgentEvent, TaskEnd, summarize_results};
use prepull_api::crd::status::NodePhase;
use prepull_api::failure::FailureCode;
use prepull_api::task::{
    ByteProgress, CheckOutcome, ImageOutcome, ImagePhase, ImageProgress, ImageResult, JobUid, NodeName,
    PullPolicy, TaskId, TaskOutcome, TaskResult,
};
use prepull_api::wire::{CloudMessage, EdgeMessage, PullKey, TaskProgress};
use prepull_engine::prepull::controller::StatusOrReport;

use crate::cloud::{DispatchFate, Fate};
use crate::edge::{Edge, Exec, image};
use crate::world::{World, millis};

impl World {
    pub(crate) fn step(&mut self) {
        match self.rng.below(100) {
            0..22 => {
                let inputs = 1 + self.rng.below(6);
                self.run_cloud(inputs);
            }
            22..30 => {
                let kind = self.rng.below(2);
                self.cloud.read_watch(kind);
            }
            30..38 => {
                let which = self.rng.below(self.cloud.writes.len());
                let fate = match self.rng.below(100) {
                    0..80 => Fate::Answered,
                    80..90 => Fate::Lost,
                    _ => Fate::AnswerLost,
                };
                self.finish_write(which, fate);
            }
            38..43 => {
                let which = self.rng.below(self.cloud.dispatches.len());
                let fate = match self.rng.below(100) {
                    0..3 => DispatchFate::Unsendable,
                    3..13 => DispatchFate::Postponed,
                    _ => DispatchFate::Sent,
                };
                self.finish_dispatch(which, fate);
            }
            43..51 => _ = self.any_conn().is_some_and(|id| self.reach_edge(id)),
            51..59 => _ = self.any_conn().is_some_and(|id| self.reach_cloud(id)),
            59..66 => {
                let (edge, works) = (self.any_edge(), self.rng.chance(93));
                self.write_record(edge, works);
            }
            66..74 => {
                let edge = self.any_edge();
                self.carry_out(edge);
            }
            74..78 => {
                let edge = self.any_edge();
                self.dial(edge);
                if let Some(id) = self.edges[edge].conn {
                    self.welcome(id);
                }
            }
            78..89 => self.pass_time(),
            89..93 => self.user(),
            _ => self.cause_fault(),
        }
    }

    fn cause_fault(&mut self) {
        match self.rng.below(23) {
            0..3 => {
                if let Some(id) = self.any_conn() {
                    self.cut(id);
                }
            }
            3..8 => {
                let edge_side = self.rng.chance(50);
                if let Some(id) = self.any_conn() {
                    self.notice(id, edge_side);
                }
            }
            8 | 9 => {
                let (any, written) = (self.any_edge(), self.rng.below(3));
                let edge = self.half_done().filter(|_| self.rng.chance(50)).unwrap_or(any);
                self.restart_edge(edge, written);
            }
            10 => {
                if self.rng.chance(30) {
                    self.restart_cloud();
                }
            }
            11 => {
                for queue in &mut self.cloud.watches {
                    queue.clear();
                }
                self.relist();
            }
            12 => {
                if !self.ghosts.is_empty() {
                    let ghost = self.ghosts.remove(0);
                    if self.rng.chance(50) && !self.would_stay_unknown(&ghost) {
                        let landed = self.land(&ghost.job, ghost.expected, &ghost.content, true);
                        let object = ghost.content.object();
                        self.log(|| format!("api: late {object:?} of {}: {landed:?}", ghost.job));
                    }
                }
            }
            13 => {
                self.collect_garbage();
                self.remove_image();
            }
            14 => self.forge(),
            15 | 16 => self.contradict_result(),
            17 => self.assign_again(),
            18 => {
                let until = self.now + self.rng.between(1_000, 90_000);
                self.log(|| format!("api: refuses reports until {until}"));
                self.reports_refused_until = until;
            }
            19 => self.delete_report(),
            20 | 21 => {
                let until = self.now + self.rng.between(1_000, 90_000);
                if let Some(job) = self.any_job() {
                    self.log(|| format!("api: does not answer for the secrets of {job} until {until}"));
                    self.secrets_hang_until.insert(job, until);
                }
            }
            _ => {
                let which = self.rng.below(self.cloud.deletes.len());
                self.finish_delete(which);
            }
        }
    }

    /// Whether a late write would create a report that the leader does not know and cannot make again: it has read the
    /// reports without it, and can't choose the same nodes again, because Nodes were deleted.
    fn would_stay_unknown(&self, ghost: &crate::cloud::Write) -> bool {
        let is_new = ghost.expected.is_none() && matches!(ghost.content.object(), StatusOrReport::Report(_));
        is_new && !self.deleted.is_empty()
    }

    pub(crate) fn finish_delete(&mut self, which: usize) {
        if which < self.cloud.deletes.len() {
            let (job, generation) = self.cloud.deletes.remove(which);
            let found = self.api.jobs.get(&job);
            if found.is_some_and(|stored| stored.object.metadata.generation == Some(generation)) {
                self.delete_job(&job);
            }
        }
    }

    /// The watches were interrupted, and begin again with lists.
    fn relist(&mut self) {
        use prepull_engine::fleet::event::FleetEvent;
        use prepull_engine::prepull::controller::Input;
        if self.cloud.boot == crate::cloud::Boot::Up {
            self.cloud.push(FleetEvent::Nodes(self.api.nodes.values().cloned().collect()));
            self.cloud.push(Input::Jobs(self.api.list()));
            let reports = self.api.reports.keys().cloned().collect();
            self.cloud.push(Input::ReportsListed(reports));
        }
    }

    /// Deletes the reports of deleted jobs, as the garbage collector does.
    pub(crate) fn collect_garbage(&mut self) {
        let jobs = &self.api.jobs;
        self.api.reports.retain(|(job, _), _| jobs.contains_key(job));
        self.api.deleted_reports.retain(|(job, _), _| jobs.contains_key(job));
    }

    /// Removes an image from an edge, as a kubelet does that needs the room.
    pub(crate) fn remove_image(&mut self) {
        // The hour decides, so that no seed leads elsewhere by that.
        let hour = usize::try_from(self.now).unwrap();
        let at = hour % self.edges.len();
        let images = &mut self.edges[at].images;
        if let Some(image) = images.iter().nth(hour % images.len().max(1)).cloned() {
            images.remove(&image);
            self.log(|| format!("n{at}: {image} is removed"));
        }
    }

    fn any_edge(&mut self) -> usize {
        self.rng.below(self.edges.len())
    }

    fn any_conn(&mut self) -> Option<u64> {
        let at = self.rng.below(self.conns.len());
        self.conns.keys().nth(at).copied()
    }

    /// (4) A node sends a message about a task that it was never given.
    fn forge(&mut self) {
        let edge = self.any_edge();
        let node = self.edges[edge].node.clone();
        let jobs: Vec<JobUid> = self.api.jobs.keys().cloned().collect();
        let Some(job) = jobs.get(self.rng.below(jobs.len())).cloned() else { return };
        let attempt = match self.api.record(&job, &node) {
            None if self.leaves_out(&job, &node) => 1,
            // About its own tasks a node may claim anything.
            _ => 99,
        };
        let task = TaskId { job, attempt };
        let message = match self.rng.below(3) {
            0 => EdgeMessage::Accepted { task },
            1 => EdgeMessage::Progress(TaskProgress { task, images: Vec::new(), waits: String::new() }),
            _ => EdgeMessage::Result(TaskResult::new(task, TaskOutcome::Succeeded)),
        };
        let conn = self.edges[edge].conn.and_then(|id| self.conns.get_mut(&id));
        if let Some(conn) = conn.filter(|conn| !conn.cut) {
            conn.to_cloud.push_back(message);
        }
    }

    /// Whether the job names its nodes, and this one is not among them.
    fn leaves_out(&self, job: &JobUid, node: &NodeName) -> bool {
        let names = self.check.beginning(job).map(|spec| &spec.image_pre_pull_template.node_names);
        names.is_some_and(|names| !names.is_empty() && !names.contains(&node.0))
    }

    /// (1) A node that has sent the result of a task sends a different one.
    fn contradict_result(&mut self) {
        let edge = self.any_edge();
        let node = self.edges[edge].node.clone();
        let ended = |job: &JobUid| {
            let record = self.api.record(job, &node).filter(|record| record.attempt > 0)?;
            let outcome = match record.phase {
                NodePhase::Successful => TaskOutcome::Failed,
                NodePhase::Failure => TaskOutcome::Succeeded,
                _ => return None,
            };
            Some((TaskId { job: job.clone(), attempt: record.attempt }, outcome))
        };
        let ended: Vec<_> = self.api.jobs.keys().filter_map(ended).collect();
        let Some((task, outcome)) = ended.get(self.rng.below(ended.len())).cloned() else { return };
        let conn = self.edges[edge].conn.and_then(|id| self.conns.get_mut(&id));
        if let Some(conn) = conn.filter(|conn| !conn.cut) {
            let reason = "a different result".to_owned();
            let result = TaskResult { reason, ..TaskResult::new(task, outcome) };
            conn.to_cloud.push_back(EdgeMessage::Result(result));
        }
    }

    /// (1) The last task that was sent in a session arrives once more, however much later.
    pub(crate) fn assign_again(&mut self) {
        if !self.duplicates {
            return;
        }
        for conn in self.conns.values_mut().filter(|conn| !conn.cut && conn.edge_open) {
            let again = conn.assigned.clone().map(CloudMessage::Assign);
            conn.to_edge.extend(again);
        }
    }

    /// An edge that has pulled some of the images of a task, but not all.
    pub(crate) fn half_done(&self) -> Option<usize> {
        let half = |exec: &Exec| {
            exec.work.done.iter().any(Option::is_some) && exec.work.done.iter().any(Option::is_none)
        };
        self.edges.iter().position(|edge| edge.execs.values().any(half))
    }

    fn pass_time(&mut self) {
        match self.rng.below(12) {
            0..5 => self.now += self.rng.between(1, 400),
            5..9 => {
                if let Some(next) = self.next_moment() {
                    self.now = next;
                }
            }
            9 => self.now += self.rng.between(400, 3_000),
            10 => self.now += self.rng.between(3_000, 30_000),
            _ => {
                if self.rng.chance(20) {
                    self.now += self.rng.between(30_000, 120_000);
                } else if self.rng.chance(2) {
                    // Longer than a job stays in memory after its end.
                    self.now += self.rng.between(3_600_000, 4_000_000);
                }
            }
        }
        self.tick_edges();
    }

    /// When the next thing is due, if any is.
    pub(crate) fn next_moment(&self) -> Option<u64> {
        let cloud = self.cloud.controller.next_wakeup().map(millis);
        let ticks = self.edges.iter().filter_map(|edge| edge.agent.next_tick());
        let ticks = ticks.map(|tick| {
            u64::try_from(tick.saturating_duration_since(self.base).as_nanos().div_ceil(1_000_000)).unwrap()
        });
        let execs = self.edges.iter().flat_map(|edge| edge.execs.values());
        let execs = execs.filter_map(|exec| exec.pulling.map(|(_, until, _)| until));
        // When a window opens or closes, which is when its executor looks.
        let looks = self.edges.iter().flat_map(|edge| {
            let wall = edge.now(self.base, self.now).wall;
            let states = edge.execs.values().filter_map(move |exec| exec.work.terms.window_state(wall).until);
            states.map(move |until| millis(until).saturating_sub(edge.skew))
        });
        cloud.into_iter().chain(ticks).chain(execs).chain(looks).filter(|at| *at > self.now).min()
    }

    pub(crate) fn tick_edges(&mut self) {
        for at in 0..self.edges.len() {
            let edge = &self.edges[at];
            let now = edge.now(self.base, self.now).monotonic;
            if edge.agent.next_tick().is_some_and(|tick| tick <= now) {
                self.on_edge(at, AgentEvent::Tick);
            }
        }
    }

    /// Makes one step of one task of the edge.
    pub(crate) fn carry_out(&mut self, at: usize) {
        let which = self.rng.below(self.edges[at].execs.len());
        let Some(id) = self.edges[at].execs.keys().nth(which).cloned() else { return };
        self.carry_out_task(at, &id);
    }

    /// Makes one step of a task. Returns whether anything happened.
    pub(crate) fn carry_out_task(&mut self, at: usize, id: &TaskId) -> bool {
        let now = self.now;
        let (base, calm) = (self.base, self.calm);
        let edge = &mut self.edges[at];
        let clock = edge.now(base, now);
        let Some(exec) = edge.execs.get_mut(id) else { return false };
        if let Some(reason) = exec.stop.clone() {
            self.end(at, id, TaskOutcome::Cancelled, &format!("cancelled: {reason}"));
            return true;
        }
        if exec.work.terms.is_over(clock) {
            self.end(at, id, TaskOutcome::DeadlineExceeded, "the deadline passed");
            return true;
        }
        if !exec.work.terms.window_state(clock.wall).is_open {
            exec.pulling = None;
            return false;
        }
        if !exec.checked {
            exec.checked = true;
            if exec.work.check.is_none() {
                let passed = calm || self.rng.chance(96);
                let outcome = CheckOutcome { passed, reason: String::new() };
                exec.work.check = Some(outcome.clone());
                self.on_edge(at, AgentEvent::Checked(id.clone(), outcome));
                return true;
            }
        }
        if exec.work.check.as_ref().is_some_and(|check| !check.passed) {
            self.end(at, id, TaskOutcome::Failed, "check failed");
            return true;
        }
        if exec.work.task.removal.is_some() {
            return self.remove_for_task(at, id);
        }
        if let Some((index, until, works)) = exec.pulling {
            if now < until {
                if calm || self.rng.chance(70) {
                    return false;
                }
                let bytes = Some(ByteProgress { done: now, total: until });
                let moment = ImageProgress {
                    bytes,
                    attempts: 1,
                    ..ImageProgress::new(u32::try_from(index).unwrap(), ImagePhase::Pulling)
                };
                self.on_edge(
                    at,
                    AgentEvent::Progress(TaskProgress {
                        task: id.clone(),
                        images: vec![moment],
                        waits: String::new(),
                    }),
                );
                return true;
            }
            exec.pulling = None;
            if works {
                edge.images.insert(exec.work.task.images[index].reference.clone());
            }
            self.image_ends(at, id, index, if works { ImageOutcome::Pulled } else { ImageOutcome::Failed });
            return true;
        }
        let Some(index) = exec.work.done.iter().position(Option::is_none) else {
            let images: Vec<_> = exec.work.done.iter().flatten().cloned().collect();
            let (outcome, reason) = summarize_results(&exec.work.task, &images);
            self.end(at, id, outcome, &reason);
            return true;
        };
        let wanted = &exec.work.task.images[index];
        if wanted.policy == PullPolicy::IfNotPresent && edge.images.contains(&wanted.reference) {
            self.image_ends(at, id, index, ImageOutcome::Present);
            return true;
        }
        if wanted.policy == PullPolicy::Never {
            let is_there = edge.images.contains(&wanted.reference);
            let outcome = if is_there { ImageOutcome::Present } else { ImageOutcome::Failed };
            self.image_ends(at, id, index, outcome);
            return true;
        }
        if !has_key(exec, index) {
            self.image_ends(at, id, index, ImageOutcome::Failed);
            return true;
        }
        let takes =
            if self.rng.chance(80) { self.rng.between(0, 2_000) } else { self.rng.between(0, 40_000) };
        exec.pulling = Some((index, now + takes, calm || self.rng.chance(88)));
        let edge = &self.edges[at];
        self.check.pulls(&self.api, edge, &edge.execs[id].work, index);
        if !calm && self.rng.chance(1) {
            self.log(|| format!("n{at}: the executor of {id} dies"));
            self.edges[at].execs.remove(id);
            self.check.stopped(&self.edges[at].node, id);
            self.on_edge(at, AgentEvent::Crashed { task: id.clone(), reason: "a bug".to_owned() });
        }
        true
    }

    fn image_ends(&mut self, at: usize, task: &TaskId, index: usize, outcome: ImageOutcome) {
        let mut result = image(outcome);
        let edge = &mut self.edges[at];
        if let Some(exec) = edge.execs.get_mut(task) {
            if !outcome.is_on_node() && exec.work.task.images[index].policy == PullPolicy::Never {
                result.code = Some(FailureCode::NotPresent);
            } else if !outcome.is_on_node() && !has_key(exec, index) {
                result.code = Some(FailureCode::SecretUnusable);
            }
            if exec.work.terms.download.pin && outcome.is_on_node() && Edge::can_pin(at) {
                result.pinned = Some(true);
                edge.pins.insert(task.job.clone());
            }
            exec.work.done[index] = Some(result.clone());
        }
        self.log(|| format!("n{at}: image {index} of {task}: {outcome:?}"));
        self.on_edge(at, AgentEvent::ImageEnded { task: task.clone(), index, result });
    }

    pub(crate) fn end(&mut self, at: usize, id: &TaskId, outcome: TaskOutcome, reason: &str) {
        let Some(exec) = self.edges[at].execs.remove(id) else { return };
        self.check.stopped(&self.edges[at].node, id);
        let rest = if outcome == TaskOutcome::Failed { ImageOutcome::Failed } else { ImageOutcome::Stopped };
        let images: Vec<ImageResult> =
            exec.work.done.into_iter().map(|done| done.unwrap_or_else(|| image(rest))).collect();
        self.log(|| format!("n{at}: {id} ends: {outcome:?} {reason}"));
        let removal = exec.work.task.removal.as_ref().zip(exec.removal);
        let removal = removal.map(|(removal, record)| record.result(removal.dry_run));
        let end = TaskEnd { removal, outcome, reason: reason.to_owned(), check: exec.work.check, images };
        self.on_edge(at, AgentEvent::Ended(id.clone(), end));
    }
}

/// Whether a key came with the task for this image, or it needs none.
fn has_key(exec: &Exec, index: usize) -> bool {
    !matches!(exec.work.terms.keys.get(index).map(|key| &**key), Some(PullKey::Unavailable { .. }))
}
