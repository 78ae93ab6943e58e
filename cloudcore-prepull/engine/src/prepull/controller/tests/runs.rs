//! Runs: a job that has ended and gets other images, nodes or overriders begins again.

use super::course::fleet;
use super::*;

fn of(nodes: &[String], image: &str) -> serde_json::Value {
    json!({"nodeNames": nodes, "concurrency": 100, "failureTolerate": "0.4", "images": [image]})
}

/// The result of an attempt with this number.
fn result_of(attempt: u32, outcome: TaskOutcome) -> EdgeMessage {
    let task = TaskId { attempt, ..task() };
    EdgeMessage::Result(TaskResult { task, ..result(outcome) })
}

impl World {
    fn all_succeed(&mut self, nodes: &[String]) {
        for node in nodes {
            let attempt = self.record(node).attempt;
            self.says(node, result_of(attempt, TaskOutcome::Succeeded));
        }
        self.pass(1_000);
    }

    /// Passes a minute, second by second.
    fn pass_minute(&mut self) {
        (0..60).for_each(|_| self.pass(1_000));
    }

    fn ends_of(&self) -> [&str; 3] {
        ["Complete", "Failed", "Finished"].map(|type_| self.condition(type_).0)
    }

    /// The nodes in all reports, each with its attempt.
    fn reported(&self) -> Vec<(&str, u32)> {
        let nodes = self.reports.values().flat_map(|report| &report.node_status);
        nodes.map(|node| (node.node_name.as_str(), node.attempt)).collect()
    }
}

#[test]
fn new_images_begin_a_run_after_the_end() {
    for (late, leader_changes) in [(false, false), (true, false), (false, true), (true, true)] {
        let (mut world, nodes) = fleet(3);
        world.give(job(of(&nodes, "app:1"), 1, None));
        world.pass(1_000);
        world.all_succeed(&nodes);
        assert_eq!((world.status().phase, world.ends_of()), (JobPhase::Completed, ["True", "False", "True"]));
        world.taken();
        // Long after its end a job is not in memory.
        world.pass(if late { 4_000_000 } else { 1_000 });
        if leader_changes {
            world.restart(&nodes);
            for node in &nodes {
                world.up(node, &[]);
            }
        }
        let stored = world.stored.clone();
        world.give(job(of(&nodes[1..], "app:2"), 2, stored.as_ref()));
        assert_eq!(world.ends_of(), ["False", "False", "False"], "nothing of app:2 is on a node");
        world.pass(1_000);
        assert_eq!(world.taken(), ["n1", "n2"]);
        assert_eq!(&world.images[3..], ["app:2", "app:2"]);
        let status = world.status();
        assert_eq!((status.phase, status.completion_time.is_none()), (JobPhase::InProgress, true));
        assert_eq!((status.summary.desired, status.first_attempt), (2, Some(2)));
        assert_eq!(world.reported(), [("n1", 2), ("n2", 2)]);
        // What is said of the first run now changes nothing.
        world.says("n1", result_of(1, TaskOutcome::Failed));
        assert_eq!((world.acks(), world.phase_of("n1")), (4, NodePhase::InProgress));
        world.all_succeed(&nodes[1..]);
        assert_eq!((world.status().phase, world.ends_of()), (JobPhase::Completed, ["True", "False", "True"]));
        assert_eq!(world.status().observed_generation, Some(2));
    }
}

#[test]
fn a_change_waits_for_the_runs_end() {
    for leader_changes in [false, true] {
        let (mut world, nodes) = fleet(2);
        world.give(job(of(&nodes, "app:1"), 1, None));
        world.pass(1_000);
        world.give(job(of(&nodes, "app:2"), 2, None));
        world.pass(1_000);
        assert_eq!((world.condition("Valid").0, world.ends_of()), ("False", ["Unknown"; 3]));
        assert_eq!((world.images.len(), world.status().phase), (2, JobPhase::InProgress));
        if leader_changes {
            world.restart(&nodes);
            let stored = world.stored.clone();
            world.give(job(of(&nodes, "app:2"), 2, stored.as_ref()));
            world.up("n0", &[(UID, 1, OpenPhase::Running)]);
            world.up("n1", &[(UID, 1, OpenPhase::NeedsKeys)]);
            world.pass(1_000);
            assert_eq!(world.images, ["app:1"; 3], "one of them again, with its keys");
            assert_eq!(world.condition("Valid").0, "False");
        }
        world.all_succeed(&nodes);
        world.pass(1_000);
        assert_eq!((world.condition("Valid").0, world.ends_of()), ("True", ["False"; 3]));
        assert_eq!((world.images.last().unwrap().as_str(), world.reported()[0]), ("app:2", ("n0", 2)));
        world.all_succeed(&nodes);
        assert_eq!(world.ends_of(), ["True", "False", "True"]);
    }
}

#[test]
fn a_change_that_is_undone_begins_nothing() {
    let (mut world, nodes) = fleet(2);
    for (image, generation) in [("app:1", 1), ("app:2", 2), ("app:1", 3)] {
        world.give(job(of(&nodes, image), generation, None));
        world.pass(1_000);
    }
    assert_eq!((world.condition("Valid").0, world.ends_of()), ("True", ["False"; 3]));
    world.all_succeed(&nodes);
    world.pass(1_000);
    assert_eq!((world.status().phase, world.images.len()), (JobPhase::Completed, 2));
    assert_eq!(world.status().first_attempt, None);
}

#[test]
fn a_leaders_early_death_loses_no_run() {
    // How many writes of the new run the API server gets.
    for writes in 0..4 {
        let (mut world, nodes) = fleet(5);
        world.controller = Controller::with_report_capacity(2);
        world.boot_again(&nodes);
        world.give(job(of(&nodes, "app:1"), 1, None));
        world.pass(1_000);
        world.all_succeed(&nodes);
        assert_eq!(world.reports.len(), 3);
        let (status, reports) = (world.stored.clone(), world.reports.clone());
        world.give(job(of(&nodes[2..], "app:2"), 2, None));
        world.pass(1_000);
        // The status comes first.
        if writes == 0 {
            world.stored = status;
        }
        for (index, report) in reports.iter().skip(writes.max(1) - 1) {
            world.reports.insert(*index, report.clone());
        }
        world.boot_again(&nodes);
        let stored = world.stored.clone();
        world.give(job(of(&nodes[2..], "app:2"), 2, stored.as_ref()));
        world.pass(1_000);
        let mut reported = world.reported();
        reported.sort_unstable();
        assert_eq!(reported, [("n2", 2), ("n3", 2), ("n4", 2)], "{writes}");
        world.all_succeed(&nodes[2..]);
        let summary = &world.status().summary;
        assert_eq!((world.status().phase, summary.desired), (JobPhase::Completed, 3), "{writes}");
        assert_eq!(world.ends_of(), ["True", "False", "True"], "{writes}");
    }
}

impl World {
    fn boot_again(&mut self, nodes: &[String]) {
        let controller = Controller::with_report_capacity(2);
        self.restart(nodes);
        self.controller = controller;
        self.hear(FleetEvent::Nodes(nodes.iter().map(|name| edge(name)).collect()));
        for node in nodes {
            self.up(node, &[]);
        }
    }
}

#[test]
fn an_edit_during_a_reread_counts() {
    let (mut world, nodes) = fleet(1);
    world.give(job(of(&nodes, "app:1"), 1, None));
    world.pass(1_000);
    world.all_succeed(&nodes);
    world.pass(4_000_000);
    let stored = world.stored.clone();
    let edits = [2, 3].map(|n| job(of(&nodes, &format!("app:{n}")), n, stored.as_ref()));
    let [Input::Job(second), Input::Job(third)] = edits else { panic!() };
    for edit in [second.clone(), third, second.clone()] {
        world.controller.handle(Input::Job(edit), world.now);
    }
    let recalled = world.controller.flush(world.now);
    assert!(matches!(recalled[..], [Action::Recall { .. }]), "{recalled:?}");
    // The read object is older than the watch's latest.
    let reports = world.stored_reports();
    world.give(Input::Recalled(JobUid(UID.to_owned()), reports, Some(second)));
    world.pass(1_000);
    assert_eq!(
        (world.images.last().unwrap().as_str(), world.status().observed_generation),
        ("app:3", Some(3))
    );
}

#[test]
fn an_invalid_change_leaves_the_end_unknown() {
    let (mut world, nodes) = fleet(1);
    world.give(job(of(&nodes, "app:1"), 1, None));
    world.pass(1_000);
    world.all_succeed(&nodes);
    world.give(job(of(&nodes, "no image"), 2, None));
    world.pass(1_000);
    assert_eq!((world.condition("Valid").0, world.ends_of()), ("False", ["Unknown"; 3]));
    assert_eq!(world.status().phase, JobPhase::Completed, "what was carried out has");
    world.give(job(of(&nodes, "app:1"), 3, None));
    world.pass(1_000);
    assert_eq!(world.ends_of(), ["True", "False", "True"]);
}

#[test]
fn an_invalid_change_keeps_the_end() {
    let (mut world, nodes) = fleet(1);
    let given = |image: &str, generation, stored: Option<&ImagePrePullJobStatus>| {
        with_spec(of(&nodes, image), json!({"activeDeadlineSeconds": 60}), generation, stored)
    };
    world.give(given("app:1", 1, None));
    world.pass_minute();
    world.pass(1_000);
    assert_eq!(world.condition("Failed"), ("True", "DeadlineExceeded"));
    world.give(given("no image", 2, None));
    world.pass(1_000);
    assert_eq!(world.condition("Failed"), ("Unknown", "SpecChanged"));
    let stored = world.status().clone();
    world.restart(&nodes);
    world.give(given("no image", 2, Some(&stored)));
    world.pass(1_000);
    world.give(given("app:1", 3, Some(&stored)));
    world.pass(1_000);
    assert_eq!(world.condition("Failed"), ("True", "DeadlineExceeded"));
}

#[test]
fn a_cancelled_job_begins_no_further_run() {
    let (mut world, nodes) = fleet(1);
    world.give(job(of(&nodes, "app:1"), 1, None));
    world.pass(1_000);
    world.give(with_spec(of(&nodes, "app:2"), json!({"cancel": true}), 2, None));
    world.pass(1_000);
    assert!(world.status().reason.contains("a cancelled job begins no new run"), "{}", world.status().reason);
    // An API server before 1.25 lets people take it back.
    world.give(job(of(&nodes, "app:2"), 3, None));
    world.pass(1_000);
    assert_eq!((world.condition("Failed"), world.images.len()), (("True", "Cancelled"), 1));
    assert_eq!((world.condition("Valid").0, world.phase_of("n0")), ("False", NodePhase::Unknown));
}

#[test]
fn an_edit_refused_by_older_versions_stays_refused() {
    let (mut world, nodes) = fleet(1);
    world.give(job(of(&nodes, "app:1"), 1, None));
    world.pass(1_000);
    world.all_succeed(&nodes);
    world.taken();
    let mut stored = world.status().clone();
    stored.observed_generation = Some(2);
    world.restart(&nodes);
    world.up("n0", &[]);
    world.give(job(of(&nodes, "app:2"), 2, Some(&stored)));
    world.pass(1_000);
    assert_eq!((world.taken(), world.images.len()), (vec![], 1));
    world.give(job(of(&nodes, "app:3"), 3, Some(&stored)));
    world.pass(1_000);
    assert_eq!(world.images.last().unwrap(), "app:3");
}

#[test]
fn a_run_without_a_ready_node_waits() {
    let (mut world, nodes) = fleet(1);
    world.give(job(of(&nodes, "app:1"), 1, None));
    world.pass(1_000);
    world.all_succeed(&nodes);
    world.hear(FleetEvent::Node(NodeView { ready: false, ..edge("n0") }));
    world.give(job(of(&nodes, "app:2"), 2, None));
    world.pass(1_000);
    assert_eq!((world.status().phase, world.ends_of()), (JobPhase::Init, ["False"; 3]));
    for leader_changes in [false, true] {
        if leader_changes {
            world.boot(&[]);
            world.hear(FleetEvent::Node(NodeView { ready: false, ..edge("n0") }));
            let stored = world.stored.clone();
            world.give(job(of(&nodes, "app:2"), 2, stored.as_ref()));
            world.pass(1_000);
        }
        assert_eq!((world.status().phase, world.images.len()), (JobPhase::Init, 1));
    }
    world.hear(FleetEvent::Node(edge("n0")));
    world.up("n0", &[]);
    world.pass(1_000);
    assert_eq!((world.status().phase, world.images.len()), (JobPhase::InProgress, 2));
    assert_eq!(world.reported(), [("n0", 2)]);
}

#[test]
fn a_waiting_runs_next_leader_empties_older_reports() {
    let (mut world, nodes) = fleet(6);
    world.boot_again(&nodes);
    world.give(job(of(&nodes, "app:1"), 1, None));
    world.pass(1_000);
    world.all_succeed(&nodes);
    let is_ready = |world: &mut World, ready| {
        for node in &nodes {
            world.hear(FleetEvent::Node(NodeView { ready, ..edge(node) }));
        }
    };
    is_ready(&mut world, false);
    world.give(job(of(&nodes[..1], "app:2"), 2, None));
    world.pass(1_000);
    assert_eq!((world.status().phase, world.reported().len()), (JobPhase::Init, 6));
    world.boot_again(&nodes);
    is_ready(&mut world, false);
    let stored = world.stored.clone();
    world.give(job(of(&nodes[..1], "app:2"), 2, stored.as_ref()));
    is_ready(&mut world, true);
    world.pass(1_000);
    world.all_succeed(&nodes[..1]);
    assert_eq!((world.status().phase, world.reported()), (JobPhase::Completed, vec![("n0", 2)]));
}

#[test]
fn a_run_unpins_its_predecessors_images() {
    let (mut world, nodes) = fleet(1);
    world.up_with("n0", &[], Hello { pins: Some(vec![JobUid("another".to_owned())]), ..Hello::default() });
    world.sent.clear();
    world.give(with_spec(of(&nodes, "app:1"), json!({"pin": true}), 1, None));
    world.pass(1_000);
    world.all_succeed(&nodes);
    let unpins = |world: &World| {
        world.sent.iter().filter(|(_, message)| matches!(message, CloudMessage::Unpin { .. })).count()
    };
    assert_eq!(unpins(&world), 0);
    // Once, although it then waits for its node.
    world.hear(FleetEvent::Node(NodeView { ready: false, ..edge("n0") }));
    world.give(with_spec(of(&nodes, "app:2"), json!({"pin": true}), 2, None));
    world.pass(1_000);
    world.hear(FleetEvent::Node(edge("n0")));
    world.pass(1_000);
    assert_eq!((unpins(&world), world.images.len()), (1, 2));
}

#[test]
fn absent_nodes_unpin_an_earlier_runs_images_too() {
    for leader_changes in [false, true] {
        let (mut world, nodes) = fleet(3);
        world.give(with_spec(of(&nodes, "app:1"), json!({"pin": true}), 1, None));
        world.pass(1_000);
        world.all_succeed(&nodes);
        let stored = world.stored.clone();
        if leader_changes {
            world.restart(&nodes);
        } else {
            for (node, session) in nodes.iter().zip(1..) {
                let (node, session) = (node.as_str().into(), SessionId(session));
                world.hear(FleetEvent::Session(SessionEvent::Down { node, session }));
            }
        }
        // Without n2.
        world.give(with_spec(of(&nodes[..2], "app:2"), json!({"pin": true}), 2, stored.as_ref()));
        world.pass(1_000);
        let connects = |world: &mut World, node: &str, open: &[(&str, u32, OpenPhase)]| {
            world.sent.clear();
            world.up_with(node, open, Hello { pins: Some(vec![JobUid(UID.to_owned())]), ..Hello::default() });
            let is_unpin =
                |(_, message): &(NodeName, CloudMessage)| matches!(message, CloudMessage::Unpin { .. });
            world.sent.iter().any(is_unpin)
        };
        for node in &nodes {
            assert!(connects(&mut world, node, &[]), "{node}, {leader_changes}");
        }
        world.pass(1_000);
        // Until it has its task, all that it has pinned is of the run before.
        assert!(connects(&mut world, "n0", &[]), "{leader_changes}");
        assert!(!connects(&mut world, "n0", &[(UID, 2, OpenPhase::Running)]), "{leader_changes}");
        world.all_succeed(&nodes[..2]);
        assert!(!connects(&mut world, "n0", &[]) && connects(&mut world, "n2", &[]), "{leader_changes}");
    }
}

#[test]
fn a_late_end_belongs_to_its_own_spec() {
    let (mut world, nodes) = fleet(1);
    world.give(job(of(&nodes, "app:1"), 1, None));
    world.pass(1_000);
    world.api_up = false;
    world.all_succeed(&nodes);
    world.give(job(of(&nodes, "app:2"), 2, None));
    world.api_up = true;
    world.pass_minute();
    assert_eq!((world.complete.len(), world.images.len()), (0, 2));
    world.all_succeed(&nodes);
    assert_eq!(world.complete, [2]);
}

#[test]
fn a_runs_end_follows_its_recorded_beginning() {
    let (mut world, nodes) = fleet(1);
    world.give(job(of(&nodes, "app:1"), 1, None));
    world.pass(1_000);
    world.all_succeed(&nodes);
    world.api_up = false;
    world.give(with_spec(of(&nodes, "app:2"), json!({"activeDeadlineSeconds": 10}), 2, None));
    world.pass_minute();
    assert!(
        !world.tried.ends_with(&[StatusOrReport::Report(0)]),
        "the records of the run before would be lost"
    );
    let first: Vec<_> = world.reports.values().map(|report| report.first_attempt).collect();
    assert_eq!((first, world.status().first_attempt), (vec![None], None));
    world.api_up = true;
    world.pass_minute();
    assert_eq!(
        (world.condition("Failed"), world.status().first_attempt),
        (("True", "DeadlineExceeded"), Some(2))
    );
}

#[test]
fn a_late_result_waits_for_the_run() {
    let (mut world, nodes) = fleet(2);
    world.give(job(of(&nodes, "app:1"), 1, None));
    world.pass(1_000);
    world.says("n1", result_of(1, TaskOutcome::Succeeded));
    world.pass(4_000_000);
    assert_eq!((world.phase_of("n0"), world.acks()), (NodePhase::Unknown, 1));
    world.api_up = false;
    world.give(job(of(&nodes[1..], "app:2"), 2, world.stored.clone().as_ref()));
    world.pass(1_000);
    // The next leader would find it Unknown, in the run before.
    world.says("n0", result_of(1, TaskOutcome::Succeeded));
    assert_eq!(world.acks(), 1);
    world.api_up = true;
    world.pass_minute();
    assert_eq!(world.acks(), 2);
}
