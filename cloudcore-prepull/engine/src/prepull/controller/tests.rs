use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use prepull_api::crd::job::ImagePrePullJob;
use prepull_api::crd::report::ReportBody;
use prepull_api::crd::status::{ImagePrePullJobStatus, JobPhase, MAX_NODES_IN_STATUS, NodePhase, NodeStatus};
use prepull_api::download::DownloadTerms;
use prepull_api::task::{CheckOutcome, ImageOutcome, ImageResult, TaskOutcome, TaskResult};
use prepull_api::wire::{EdgeMessage, Hello, OpenPhase, OpenTask, TaskProgress};
use serde_json::json;

use super::*;
use crate::fleet::session::SessionEvent;
use crate::prepull::download;
use crate::shared::outcomes::DispatchOutcome;

mod cancel;
mod course;
mod edits;
mod events;
mod kinds;
mod late;
mod leaving;
mod left_out;
mod loads;
mod pins;
mod rechecks;
mod relabelled;
mod reports;
mod requests;
mod resumed;
mod rounds;
mod runs;
mod starts;
mod windows;
mod withheld;

const UID: &str = "uid-1";

/// A controller between an API server and edges that the test plays.
struct World {
    controller: Controller,
    now: Timestamp,
    /// What the API server has.
    stored: Option<ImagePrePullJobStatus>,
    reports: BTreeMap<u32, ReportBody>,
    /// The generation of each status with a Complete job.
    complete: Vec<i64>,
    deleted: usize,
    /// The generation of the last deletion that was asked for.
    deleted_generation: Option<i64>,
    /// The job as the watch delivered it last.
    object: Option<JobObject>,
    /// Of each dispatch, the images that are there already.
    there: Vec<Vec<usize>>,
    /// Of each dispatch, whether the node only looks.
    looks: Vec<bool>,
    /// What was to be pulled, image by image.
    images: Vec<String>,
    /// What was to be pulled, by its reference, and with which secrets.
    pulls: Vec<String>,
    /// Its session takes nothing.
    dead: Option<NodeName>,
    /// Why the secrets cannot be read, if they cannot.
    secrets: Option<&'static str>,
    /// Whether the owner of the secret s/t has not allowed its use.
    withheld: bool,
    /// How many nodes are still asked first if they need what is withheld.
    asks: usize,
    /// How the next dispatch ends, if it is none of these.
    next_outcome: Option<DispatchOutcome>,
    /// Writes, successful or not.
    tried: Vec<StatusOrReport>,
    sent: Vec<(NodeName, CloudMessage)>,
    /// The download terms of each dispatch.
    terms: Vec<DownloadTerms>,
    dispatched: Vec<NodeName>,
    /// The secrets of each image of each dispatch.
    used_secrets: Vec<String>,
    events: Vec<&'static str>,
    /// Of each reason the last event: whether it's a warning, and its note.
    notes: BTreeMap<&'static str, (bool, String)>,
    writes: usize,
    /// Of each dispatch, the time that was left.
    remaining: Vec<Duration>,
    /// Whether writes succeed at once.
    api_up: bool,
    /// Whether the API server answers to writes, which it takes anyway.
    answers: bool,
    unanswered: Vec<Input>,
    sessions: u64,
}

impl World {
    fn new(nodes: &[&str]) -> Self {
        let mut world = Self {
            controller: Controller::default(),
            now: Timestamp::from_second(1_000_000).unwrap(),
            complete: Vec::new(),
            stored: None,
            reports: BTreeMap::new(),
            deleted: 0,
            deleted_generation: None,
            object: None,
            there: Vec::new(),
            looks: Vec::new(),
            images: Vec::new(),
            pulls: Vec::new(),
            dead: None,
            secrets: None,
            withheld: false,
            asks: 0,
            next_outcome: None,
            tried: Vec::new(),
            sent: Vec::new(),
            terms: Vec::new(),
            dispatched: Vec::new(),
            used_secrets: Vec::new(),
            events: Vec::new(),
            notes: BTreeMap::new(),
            writes: 0,
            remaining: Vec::new(),
            api_up: true,
            answers: true,
            unanswered: Vec::new(),
            sessions: 0,
        };
        world.boot(nodes);
        world
    }

    fn boot(&mut self, nodes: &[&str]) {
        self.controller = Controller::default();
        self.hear(FleetEvent::Nodes(nodes.iter().map(|name| edge(name)).collect()));
    }

    fn stored_reports(&self) -> Vec<ImagePrePullReport> {
        let owner = OwnerReference { uid: UID.to_owned(), ..OwnerReference::default() };
        let report = |body: &ReportBody| ImagePrePullReport {
            metadata: ObjectMeta { owner_references: Some(vec![owner.clone()]), ..ObjectMeta::default() },
            body: body.clone(),
            types: None,
        };
        self.reports.values().map(report).collect()
    }

    fn hear(&mut self, event: FleetEvent) {
        self.controller.note_fleet_event(event, self.now);
        self.settle();
    }

    fn give(&mut self, input: Input) {
        match &input {
            Input::Job(object) => self.object = Some(object.clone()),
            Input::Jobs(objects) => self.object = objects.last().cloned(),
            _ => {}
        }
        self.controller.handle(input, self.now);
        self.settle();
    }

    /// Carries out actions until there are none.
    fn settle(&mut self) {
        loop {
            let actions = self.controller.flush(self.now);
            if actions.is_empty() {
                return;
            }
            for action in actions {
                match action {
                    Action::Send(node, message) => self.sent.push((node, message)),
                    Action::Event(event) => {
                        self.events.push(event.reason);
                        self.notes.insert(event.reason, (event.warning, event.note));
                    }
                    Action::Dispatch(order) => {
                        self.dispatched.push(order.node.clone());
                        self.there.push(order.there.clone());
                        self.looks.push(order.only_look);
                        self.remaining.push(order.remaining);
                        self.terms.push(download::download_terms(&order.job, &order.node, None, false));
                        self.pulls.extend(order.plan.images.iter().map(|image| {
                            let secrets: Vec<_> = image.secrets.iter().map(ToString::to_string).collect();
                            format!("{} {}", image.pull, secrets.join(","))
                        }));
                        self.images.extend(order.plan.images.iter().map(|image| image.image.clone()));
                        let secrets = order.plan.images.iter().flat_map(|image| &image.secrets);
                        self.used_secrets.extend(secrets.map(ToString::to_string));
                        let outcome = if let Some(outcome) = self.next_outcome.take() {
                            outcome
                        } else if self.dead.as_ref() == Some(&order.node) {
                            DispatchOutcome::Offline
                        } else if let Some(reason) = self.secrets {
                            DispatchOutcome::Postponed(reason.to_owned())
                        } else if self.withheld && self.asks > 0 && order.asks_first {
                            self.asks -= 1;
                            DispatchOutcome::SentWithoutKeys(SessionId(self.sessions))
                        } else if self.withheld && order.may_wait {
                            let (secrets, reason) = (vec!["s/t".to_owned()], "s/t is not allowed".to_owned());
                            DispatchOutcome::Withheld { secrets, reason }
                        } else {
                            DispatchOutcome::Sent(SessionId(self.sessions))
                        };
                        let (job, node, attempt) = (order.job.uid.clone(), order.node, order.attempt);
                        self.controller
                            .handle(Input::Dispatched { job, node, attempt, outcome, keys: None }, self.now);
                    }
                    Action::Write { job, version, content, .. } => {
                        self.writes += 1;
                        let object = content.object();
                        self.tried.push(object);
                        let outcome = if self.api_up { WriteOutcome::Done } else { WriteOutcome::Failed };
                        match content {
                            _ if !self.api_up => {}
                            Content::Status(status) => {
                                let mut ends =
                                    status.conditions.iter().filter(|known| known.type_ == "Complete");
                                let is_complete = ends.any(|known| known.status == "True");
                                self.complete.extend(status.observed_generation.filter(|_| is_complete));
                                self.stored = Some(*status);
                            }
                            Content::Report(report) => _ = self.reports.insert(report.index, *report),
                        }
                        let written = Input::Written { job, object, version, outcome, stored: None };
                        if self.answers {
                            self.controller.handle(written, self.now);
                        } else {
                            self.unanswered.push(written);
                        }
                    }
                    Action::Delete { generation, .. } => {
                        self.deleted += 1;
                        self.deleted_generation = Some(generation);
                    }
                    Action::Forget(_) => {}
                    Action::Recall { job, .. } => {
                        let (reports, mut object) = (self.stored_reports(), self.object.clone());
                        if let Some(Ok(job) | Err(UnreadableJob { rest: job, .. })) = &mut object
                            && job.status.is_none()
                        {
                            job.status.clone_from(&self.stored);
                        }
                        self.controller.handle(Input::Recalled(job, reports, object), self.now);
                    }
                }
            }
        }
    }

    /// The API server answers to all writes.
    fn answer(&mut self) {
        self.answers = true;
        for written in std::mem::take(&mut self.unanswered) {
            self.give(written);
        }
    }

    fn pass(&mut self, millis: i64) {
        self.now = self.now.checked_add(jiff::SignedDuration::from_millis(millis)).unwrap();
        self.settle();
    }

    fn up(&mut self, node: &str, open: &[(&str, u32, OpenPhase)]) {
        self.up_with(node, open, Hello::default());
    }

    /// `hello`: the edge's other properties.
    fn up_with(&mut self, node: &str, open: &[(&str, u32, OpenPhase)], hello: Hello) {
        self.sessions += 1;
        let open = open
            .iter()
            .map(|(job, attempt, phase)| OpenTask {
                task: TaskId { job: JobUid((*job).to_owned()), attempt: *attempt },
                phase: *phase,
                limited: false,
            })
            .collect();
        let hello = Hello { open, ..hello };
        self.hear(FleetEvent::Session(SessionEvent::Up {
            node: node.into(),
            session: SessionId(self.sessions),
            hello: Box::new(hello),
        }));
    }

    fn says(&mut self, node: &str, message: EdgeMessage) {
        let session = SessionId(self.sessions);
        self.hear(FleetEvent::Session(SessionEvent::Message { node: node.into(), session, message }));
    }

    fn ends(&mut self, node: &str, outcome: TaskOutcome) {
        self.says(node, EdgeMessage::Result(result(outcome)));
    }

    fn status(&self) -> &ImagePrePullJobStatus {
        self.stored.as_ref().unwrap()
    }

    fn phase_of(&self, node: &str) -> NodePhase {
        self.record(node).phase
    }

    /// As the reports have it.
    fn record(&self, node: &str) -> &NodeStatus {
        let mut nodes = self.reports.values().flat_map(|report| &report.node_status);
        nodes.find(|n| n.node_name == node).unwrap()
    }

    fn acks(&self) -> usize {
        self.sent.iter().filter(|(_, message)| matches!(message, CloudMessage::ResultAck { .. })).count()
    }

    fn cancels(&self) -> Vec<&str> {
        let cancels = self.sent.iter().filter(|(_, message)| matches!(message, CloudMessage::Cancel { .. }));
        cancels.map(|(node, _)| node.as_str()).collect()
    }
}

fn edge(name: &str) -> NodeView {
    let labels = [(prepull_api::crd::EDGE_LABEL.to_owned(), String::new())].into();
    NodeView { name: name.into(), labels, ready: true }
}

fn task() -> TaskId {
    TaskId { job: JobUid(UID.to_owned()), attempt: 1 }
}

fn result(outcome: TaskOutcome) -> TaskResult {
    let there = outcome == TaskOutcome::Succeeded;
    let outcome_of_image = if there { ImageOutcome::Pulled } else { ImageOutcome::Failed };
    TaskResult {
        removal: None,
        task: task(),
        outcome,
        reason: if there { String::new() } else { "nginx:1.25: wrong password".to_owned() },
        check: Some(CheckOutcome { passed: true, reason: String::new() }),
        images: vec![ImageResult {
            digest: there.then(|| format!("sha256:{}", "0".repeat(64))),
            attempts: 1,
            ..ImageResult::new(outcome_of_image)
        }],
        took: Duration::from_secs(1),
    }
}

fn job(template: serde_json::Value, generation: i64, status: Option<&ImagePrePullJobStatus>) -> Input {
    with_spec(template, json!({}), generation, status)
}

/// `spec`: what stands beside the template.
fn with_spec(
    mut template: serde_json::Value,
    mut spec: serde_json::Value,
    generation: i64,
    status: Option<&ImagePrePullJobStatus>,
) -> Input {
    if template.get("images").is_none() {
        template["images"] = json!(["nginx:1.25"]);
    }
    spec["imagePrePullTemplate"] = template;
    let object = json!({
        "apiVersion": "operations.kubeedge.io/v1alpha2", "kind": "ImagePrePullJob",
        "metadata": {"name": "job", "uid": UID, "generation": generation},
        "spec": spec,
        "status": status,
    });
    Input::Job(Ok(Box::new(serde_json::from_value(object).unwrap())))
}

/// A job with an unreadable spec, for this reason.
fn unreadable(
    uid: &str,
    generation: i64,
    status: Option<&ImagePrePullJobStatus>,
    error: &str,
) -> UnreadableJob {
    let metadata = ObjectMeta {
        name: Some("job".to_owned()),
        uid: Some(uid.to_owned()),
        generation: Some(generation),
        ..ObjectMeta::default()
    };
    let rest = ImagePrePullJob { metadata, status: status.cloned(), ..ImagePrePullJob::default() };
    UnreadableJob { rest: Box::new(rest), error: error.to_owned() }
}

fn on(nodes: &[&str]) -> Input {
    job(json!({"nodeNames": nodes, "concurrency": 2, "failureTolerate": "0"}), 1, None)
}

#[test]
fn a_start_is_recorded_before_it_is_sent() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.api_up = false;
    world.give(on(&["a"]));
    assert_eq!((world.writes, world.dispatched.len()), (1, 0));
    world.api_up = true;
    world.pass(300);
    assert_eq!(world.phase_of("a"), NodePhase::InProgress);
    assert_eq!(world.dispatched, ["a".into()]);
}

#[test]
fn a_result_is_recorded_before_its_acknowledgement() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(on(&["a"]));
    world.says("a", EdgeMessage::Accepted { task: task() });
    world.pass(1000);
    world.api_up = false;
    world.ends("a", TaskOutcome::Succeeded);
    assert_eq!(world.acks(), 0);
    for _ in 0..5 {
        world.pass(1000);
        assert_eq!(world.acks(), 0);
    }
    world.api_up = true;
    world.pass(10_000);
    assert_eq!(world.acks(), 1);
    assert_eq!(world.status().phase, JobPhase::Completed);
    assert!(world.status().completion_time.is_some());
    assert_eq!(world.events, ["Started", "Completed"]);
    // The same result once more, as after a lost acknowledgement.
    world.ends("a", TaskOutcome::Succeeded);
    assert_eq!(world.acks(), 2);
}

#[test]
fn a_repeated_result_is_acknowledged_once() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(on(&["a"]));
    world.api_up = false;
    for _ in 0..1_000 {
        world.ends("a", TaskOutcome::Succeeded);
    }
    world.api_up = true;
    world.pass(10_000);
    assert_eq!(world.acks(), 1);
}

#[test]
fn a_deleted_jobs_results_are_acknowledged() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(on(&["a"]));
    world.pass(1000);
    world.api_up = false;
    world.ends("a", TaskOutcome::Succeeded);
    assert_eq!(world.acks(), 0);
    world.give(Input::JobGone(JobUid(UID.to_owned())));
    assert_eq!(world.acks(), 1, "nothing is left to record");
}

#[test]
fn a_burst_of_results_makes_one_write() {
    let names: Vec<String> = (0..50).map(|n| format!("n{n}")).collect();
    let nodes: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut world = World::new(&nodes);
    for node in &nodes {
        world.up(node, &[]);
    }
    world.give(job(json!({"nodeNames": nodes, "concurrency": 50, "failureTolerate": "0"}), 1, None));
    // The report, then the status.
    assert_eq!((world.writes, world.dispatched.len()), (2, 50));
    for node in &nodes {
        world.ends(node, TaskOutcome::Succeeded);
    }
    assert_eq!(world.writes, 2);
    world.pass(200);
    assert_eq!((world.writes, world.acks()), (4, 50));
    assert_eq!(world.status().phase, JobPhase::Completed);
}

#[test]
fn an_edit_revives_an_invalid_job() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(job(json!({"nodeNames": ["a"], "failureTolerate": "many"}), 1, None));
    assert_eq!(world.status().phase, JobPhase::Failure);
    assert!(world.status().reason.contains("failureTolerate"), "{}", world.status().reason);
    let valid = &world.status().conditions[0];
    assert_eq!((valid.type_.as_str(), valid.status.as_str()), ("Valid", "False"));
    assert_eq!(world.events, ["InvalidSpec"]);
    world.pass(1000);
    world.give(job(json!({"nodeNames": ["a"]}), 2, None));
    assert_eq!(world.status().phase, JobPhase::InProgress);
    assert_eq!((world.status().conditions[0].status.as_str(), world.dispatched.len()), ("True", 1));
}

#[test]
fn a_restart_does_not_rejudge_invalid_jobs() {
    let mut world = World::new(&["a"]);
    world.give(job(json!({"nodeNames": []}), 1, None));
    let stored = world.status().clone();
    world.boot(&["a"]);
    let writes = world.writes;
    world.give(job(json!({"nodeNames": []}), 1, Some(&stored)));
    world.pass(5000);
    assert_eq!((world.writes, world.events.len()), (writes, 1));
}

#[test]
fn a_job_without_eligible_nodes_names_them() {
    let mut world = World::new(&["a"]);
    world.give(on(&["nowhere"]));
    assert_eq!(world.status().phase, JobPhase::Failure);
    assert!(world.status().reason.contains("nowhere is not found"), "{}", world.status().reason);
    assert_eq!(world.status().skipped_nodes[0].reason, "not found");
    assert_eq!(world.events, ["NoEligibleNodes"]);
}

#[test]
fn deleting_a_job_cancels_what_runs() {
    let mut world = World::new(&["a", "b"]);
    world.up("a", &[]);
    world.up("b", &[]);
    world.give(on(&["a", "b"]));
    world.pass(300);
    world.ends("a", TaskOutcome::Succeeded);
    world.pass(300);
    world.give(Input::JobGone(JobUid(UID.to_owned())));
    assert_eq!(world.cancels(), ["b"]);
    // The answer finds no job, and is let go.
    let acks = world.acks();
    world.ends("b", TaskOutcome::Cancelled);
    assert_eq!(world.acks(), acks + 1);
}

#[test]
fn a_returning_edge_learns_of_deleted_jobs() {
    let mut world = World::new(&["a"]);
    world.up(
        "a",
        &[
            ("gone", 1, OpenPhase::Running),
            ("gone-too", 1, OpenPhase::NeedsKeys),
            ("done", 1, OpenPhase::Finished),
        ],
    );
    assert_eq!(world.cancels(), ["a", "a"]);
}

#[test]
fn a_restart_resumes_from_stored_records() {
    let mut world = World::new(&["a", "b", "c"]);
    for node in ["a", "b", "c"] {
        world.up(node, &[]);
    }
    world.give(on(&["a", "b", "c"]));
    world.pass(300);
    world.ends("a", TaskOutcome::Succeeded);
    world.pass(300);
    assert_eq!(world.dispatched, ["a".into(), "b".into(), "c".into()]);
    let stored = world.status().clone();

    world.boot(&["a", "b", "c"]);
    world.dispatched.clear();
    let spec = json!({"nodeNames": ["a", "b", "c"], "concurrency": 2, "failureTolerate": "0"});
    world.give(job(spec, 1, Some(&stored)));
    assert_eq!(world.dispatched, []);
    // One goes on pulling, the other was restarted as well.
    world.up("b", &[(UID, 1, OpenPhase::Running)]);
    world.up("c", &[(UID, 1, OpenPhase::NeedsKeys)]);
    world.up("a", &[]);
    assert_eq!(world.dispatched, ["c".into()]);
    world.ends("b", TaskOutcome::Succeeded);
    world.ends("c", TaskOutcome::Succeeded);
    world.pass(300);
    assert_eq!(world.status().phase, JobPhase::Completed);
    assert_eq!(world.status().start_time, stored.start_time);
    assert_eq!(world.cancels(), Vec::<&str>::new());
}

#[test]
fn a_late_result_does_not_reopen_a_job() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(job(json!({"nodeNames": ["a"], "timeoutSeconds": 10}), 1, None));
    world.pass(12_000);
    world.pass(300);
    assert_eq!((world.status().phase, world.phase_of("a")), (JobPhase::Failure, NodePhase::Unknown));
    assert_eq!(world.cancels(), ["a"]);
    let stored = world.status().clone();
    // Even over a restart of cloudcore.
    world.boot(&["a"]);
    world.give(job(json!({"nodeNames": ["a"], "timeoutSeconds": 10}), 1, Some(&stored)));
    world.up("a", &[(UID, 1, OpenPhase::Finished)]);
    world.ends("a", TaskOutcome::Succeeded);
    world.pass(1000);
    assert_eq!((world.status().phase, world.phase_of("a")), (JobPhase::Failure, NodePhase::Successful));
    assert_eq!(world.status().completion_time, stored.completion_time);
    assert_eq!(world.acks(), 1);
    // Also where cloudcore was killed when the report was written, and the status was not.
    world.stored = Some(stored.clone());
    world.boot(&["a"]);
    world.give(job(json!({"nodeNames": ["a"], "timeoutSeconds": 10}), 1, Some(&stored)));
    world.pass(5000);
    assert_eq!((world.status().summary.successful, world.status().summary.unknown), (1, 0));
}

#[test]
fn a_running_job_follows_concurrency_not_images() {
    let mut world = World::new(&["a", "b"]);
    world.up("a", &[]);
    world.up("b", &[]);
    let spec =
        |concurrency, image| json!({"nodeNames": ["a", "b"], "concurrency": concurrency, "images": [image]});
    world.give(job(spec(1, "nginx:1.25"), 1, None));
    assert_eq!(world.dispatched.len(), 1);
    world.pass(1000);
    world.give(job(spec(2, "nginx:1.25"), 2, None));
    world.pass(1000);
    assert_eq!(world.dispatched.len(), 2);
    world.give(job(spec(2, "redis:7"), 3, None));
    world.pass(1000);
    assert!(world.events.contains(&"SpecChangeIgnored"));
    let valid = &world.status().conditions[0];
    assert_eq!((valid.status.as_str(), valid.reason.as_str()), ("False", "Refused"));
    assert_eq!(world.status().observed_generation, Some(3));
}

#[test]
fn a_replaced_session_ends_without_effect() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.up("a", &[]);
    world.hear(FleetEvent::Session(SessionEvent::Down { node: "a".into(), session: SessionId(1) }));
    world.give(on(&["a"]));
    assert_eq!(world.dispatched, ["a".into()]);
}

#[test]
fn an_unreadable_job_fails_alone() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    let broken = unreadable("broken", 1, None, "images: not a list");
    world.give(Input::Job(Err(broken)));
    assert_eq!(world.status().phase, JobPhase::Failure);
    assert!(world.status().reason.contains("not a list"));
    world.give(on(&["a"]));
    assert_eq!(world.dispatched, ["a".into()]);
}

#[test]
fn an_unreadable_secret_frees_the_slot() {
    let mut world = World::new(&["a", "b"]);
    world.up("a", &[]);
    world.up("b", &[]);
    world.secrets = Some("secret s/t could not be read: 500");
    world.give(job(json!({"nodeNames": ["a"], "failureTolerate": "0"}), 1, None));
    world.pass(2_000);
    assert_eq!(
        (world.phase_of("a"), world.record("a").reason.as_str()),
        (NodePhase::Pending, "secret s/t could not be read: 500")
    );
    assert_eq!(world.record("a").start_time, None);
    world.pass(2_000);
    assert_eq!(world.status().reason, "1 node waiting: secret s/t could not be read: 500");
    assert_eq!(world.dispatched.len(), 1, "it is not tried all the time");
    world.secrets = None;
    world.pass(2_000);
    assert_eq!(world.dispatched.len(), 2);
    world.pass(300);
    assert_eq!(world.phase_of("a"), NodePhase::InProgress);
    world.ends("a", TaskOutcome::Succeeded);
    world.pass(2_000);
    assert_eq!((world.status().phase, world.status().reason.as_str()), (JobPhase::Completed, ""));
}

#[test]
fn waiting_for_a_secret_ends_in_failure() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.secrets = Some("secret s/t could not be read: 500");
    world.give(on(&["a"]));
    for _ in 0..400 {
        world.pass(1_000);
        if world.status().completion_time.is_some() {
            break;
        }
    }
    let took = world.now.duration_since(Timestamp::from_second(1_000_000).unwrap()).as_secs();
    assert!((200..=300).contains(&took), "{took} s of 300");
    assert!(world.dispatched.len() < 10, "{}", world.dispatched.len());
    assert_eq!(
        (world.phase_of("a"), world.record("a").reason.as_str()),
        (NodePhase::Failure, "secret s/t could not be read: 500")
    );
    assert_eq!(world.events, ["Started", "NodeFailed", "Failed"]);
}

#[test]
fn a_secrets_wait_counts_as_node_time() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.secrets = Some("secret s/t could not be read: 500");
    world.give(on(&["a"]));
    for _ in 0..30 {
        world.pass(1_000);
    }
    world.secrets = None;
    for _ in 0..30 {
        world.pass(1_000);
    }
    assert_eq!(world.phase_of("a"), NodePhase::InProgress);
    let passed = world.now.duration_since(Timestamp::from_second(1_000_000).unwrap()).as_secs();
    for _ in passed..303 {
        world.pass(1_000);
    }
    assert_eq!(world.phase_of("a"), NodePhase::Unknown, "300 s and the grace of 2 s are over");
}

#[test]
fn a_running_node_keeps_its_slot_without_keys() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(on(&["a"]));
    world.says("a", EdgeMessage::Accepted { task: task() });
    world.secrets = Some("secret s/t could not be read: 500");
    world.up("a", &[(UID, 1, OpenPhase::NeedsKeys)]);
    assert_eq!((world.dispatched.len(), world.phase_of("a")), (2, NodePhase::InProgress));
    world.pass(2_000);
    assert_eq!(world.status().reason, "", "it works, and does not wait to begin");
    world.secrets = None;
    for _ in 0..6 {
        world.pass(1_000);
    }
    assert_eq!((world.dispatched.len(), world.phase_of("a")), (3, NodePhase::InProgress));
    assert_eq!(world.cancels(), [""; 0]);
}

#[test]
fn reconnecting_ends_the_wait_for_a_secret() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.secrets = Some("secret s/t could not be read: 500");
    world.give(on(&["a"]));
    let session = SessionId(world.sessions);
    world.hear(FleetEvent::Session(SessionEvent::Down { node: "a".into(), session }));
    world.pass(1_000);
    assert_eq!(world.record("a").reason, "offline: its edgecore-prepull is not connected");
    world.secrets = None;
    world.up("a", &[]);
    world.pass(300);
    assert_eq!(world.phase_of("a"), NodePhase::InProgress);
}
