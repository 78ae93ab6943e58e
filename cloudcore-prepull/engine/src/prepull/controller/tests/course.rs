//! The course of a job: waves, suspension, deadlines, further rounds, nodes that join or are shared.

use super::*;

/// Nodes `n0`…, all online.
pub(super) fn fleet(nodes: usize) -> (World, Vec<String>) {
    let names: Vec<String> = (0..nodes).map(|n| format!("n{n}")).collect();
    let mut world = World::new(&names.iter().map(String::as_str).collect::<Vec<_>>());
    for node in &names {
        world.up(node, &[]);
    }
    (world, names)
}

pub(super) fn template(nodes: &[String]) -> serde_json::Value {
    json!({"nodeNames": nodes, "concurrency": 100, "failureTolerate": "0.3"})
}

impl World {
    /// What was dispatched since the last call.
    pub(super) fn taken(&mut self) -> Vec<String> {
        std::mem::take(&mut self.dispatched).into_iter().map(|node| node.0).collect()
    }

    pub(super) fn all_end(&mut self, nodes: &[String], outcome: TaskOutcome) {
        for node in nodes {
            self.ends(node, outcome);
        }
        self.pass(1000);
    }

    pub(super) fn condition(&self, type_: &str) -> (&str, &str) {
        let found = self.status().conditions.iter().find(|condition| condition.type_ == type_).unwrap();
        (&found.status, &found.reason)
    }

    pub(super) fn restart(&mut self, nodes: &[String]) {
        self.boot(&nodes.iter().map(String::as_str).collect::<Vec<_>>());
        self.dispatched.clear();
    }
}

#[test]
fn waves_begin_in_order_after_the_pause() {
    let (mut world, nodes) = fleet(20);
    let spec = json!({"rollout": {"steps": ["5%", "4", "100%"], "pauseSeconds": 60}});
    world.give(with_spec(template(&nodes), spec.clone(), 1, None));
    let first = world.taken();
    assert_eq!(first, ["n0"]);
    let wave = |world: &World| world.status().rollout.clone().map(|w| (w.step, w.steps, w.nodes)).unwrap();
    assert_eq!(wave(&world), (1, 3, 1));
    world.all_end(&first, TaskOutcome::Succeeded);
    world.pass(58_000);
    assert!(world.taken().is_empty() && world.status().rollout.as_ref().unwrap().paused_until.is_some());
    // The pause outlives a restart of the cloud.
    let stored = world.status().clone();
    world.restart(&nodes);
    world.give(with_spec(template(&nodes), spec, 1, Some(&stored)));
    for node in &nodes {
        world.up(node, &[]);
    }
    assert!(world.taken().is_empty());
    world.pass(2_000);
    let second = world.taken();
    assert_eq!((second.len(), wave(&world)), (3, (2, 3, 4)));
    world.all_end(&second, TaskOutcome::Succeeded);
    world.pass(61_000);
    let third = world.taken();
    assert_eq!((third.len(), wave(&world)), (16, (3, 3, 20)));
    world.all_end(&third, TaskOutcome::Succeeded);
    assert_eq!(world.status().phase, JobPhase::Completed);
    let announced = ["Started", "WaveEnded", "WaveStarted", "WaveEnded", "WaveStarted", "Completed"];
    assert_eq!(world.events, announced);
}

#[test]
fn a_wave_beyond_tolerance_ends_the_job() {
    let (mut world, nodes) = fleet(20);
    let spec = json!({"rollout": {"steps": ["10%", "100%"]}});
    world.give(with_spec(template(&nodes), spec, 1, None));
    let first = world.taken();
    assert_eq!(first.len(), 2);
    world.ends(&first[0], TaskOutcome::Failed);
    world.ends(&first[1], TaskOutcome::Succeeded);
    world.pass(1000);
    // One of twenty would be tolerated; one of the two of this wave is not.
    assert_eq!((world.status().phase, world.taken().len()), (JobPhase::Failure, 0));
    assert!(world.status().reason.contains("of the 2 nodes of wave 1 failed"), "{}", world.status().reason);
    assert_eq!(world.status().summary.pending, 18);
    assert!(world.record("n9").reason.contains("not started"));
}

#[test]
fn suspension_starts_none_and_stops_none() {
    let (mut world, nodes) = fleet(3);
    let one_by_one = json!({"nodeNames": nodes, "concurrency": 1});
    world.give(with_spec(one_by_one.clone(), json!({}), 1, None));
    world.pass(1000);
    world.give(with_spec(one_by_one.clone(), json!({"suspend": true}), 2, None));
    let first = world.taken();
    world.all_end(&first, TaskOutcome::Succeeded);
    world.pass(2000);
    assert_eq!((world.taken().len(), world.condition("Suspended").0), (0, "True"));
    assert_eq!(world.condition("Progressing").0, "False");
    assert_eq!((world.status().summary.successful, world.status().phase), (1, JobPhase::InProgress));
    world.give(with_spec(one_by_one, json!({"suspend": false}), 3, None));
    world.pass(1000);
    assert_eq!((world.taken().len(), world.condition("Suspended").0), (1, "False"));
    assert!(world.events.contains(&"Suspended") && world.events.contains(&"Resumed"));
}

#[test]
fn the_deadline_does_not_count_suspensions() {
    let (mut world, nodes) = fleet(2);
    let one_by_one = json!({"nodeNames": nodes, "concurrency": 1});
    let spec = |suspend| json!({"activeDeadlineSeconds": 60, "suspend": suspend});
    world.give(with_spec(one_by_one.clone(), spec(true), 1, None));
    world.pass(100_000);
    assert_eq!((world.status().phase, world.taken().len()), (JobPhase::InProgress, 0));
    world.give(with_spec(one_by_one, spec(false), 2, None));
    world.pass(59_000);
    assert_eq!((world.status().phase, world.taken().len()), (JobPhase::InProgress, 1));
    world.pass(1_000);
    world.pass(1_000);
    assert_eq!((world.status().phase, world.cancels()), (JobPhase::Failure, vec!["n0"]));
    assert_eq!(world.condition("Failed"), ("True", "DeadlineExceeded"));
    assert_eq!((world.phase_of("n0"), world.phase_of("n1")), (NodePhase::Unknown, NodePhase::Pending));
    assert!(world.record("n1").reason.contains("the time of the job was over"));
}

#[test]
fn a_job_is_deleted_after_its_ttl() {
    let (mut world, nodes) = fleet(1);
    world.give(with_spec(template(&nodes), json!({"ttlSecondsAfterFinished": 30}), 1, None));
    world.all_end(&nodes, TaskOutcome::Succeeded);
    world.pass(28_000);
    assert_eq!((world.status().phase, world.deleted), (JobPhase::Completed, 0));
    world.pass(2_000);
    assert_eq!(world.deleted, 1);
    // It had no effect: it is asked for again, and not at once.
    world.pass(10_000);
    assert_eq!(world.deleted, 1);
    world.pass(30_000);
    assert_eq!(world.deleted, 2);
    world.give(Input::JobGone(JobUid(UID.to_owned())));
    world.pass(60_000);
    assert_eq!(world.deleted, 2);
}

#[test]
fn a_retry_survives_a_restart() {
    let (mut world, nodes) = fleet(3);
    let template =
        json!({"nodeNames": nodes, "concurrency": 3, "failureTolerate": "0", "timeoutSeconds": 10});
    world.give(with_spec(template.clone(), json!({}), 1, None));
    world.ends("n0", TaskOutcome::Succeeded);
    world.ends("n1", TaskOutcome::Failed);
    world.pass(13_000);
    world.pass(1_000);
    assert_eq!((world.status().phase, world.taken().len()), (JobPhase::Failure, 3));
    let stored = world.status().clone();
    world.restart(&nodes);
    world.give(with_spec(template.clone(), json!({}), 1, Some(&stored)));
    for node in &nodes {
        world.up(node, &[]);
    }
    world.pass(1_000);
    assert!(world.taken().is_empty());
    world.give(with_spec(template, json!({"retry": 1}), 2, Some(&stored)));
    world.pass(1_000);
    assert_eq!(world.taken(), ["n1", "n2"]);
    assert_eq!((world.status().phase, world.status().retry), (JobPhase::InProgress, 1));
    assert_eq!((world.record("n1").attempt, world.record("n0").attempt), (2, 1));
    // The first attempt's late result is of no account, and is taken.
    let acks = world.acks();
    world.ends("n2", TaskOutcome::Failed);
    assert_eq!((world.acks(), world.phase_of("n2")), (acks + 1, NodePhase::InProgress));
    for node in ["n1", "n2"] {
        let mut result = result(TaskOutcome::Succeeded);
        result.task.attempt = 2;
        world.says(node, EdgeMessage::Result(result));
    }
    world.pass(1_000);
    assert_eq!((world.status().phase, world.status().summary.successful), (JobPhase::Completed, 3));
    assert!(world.status().completion_time.is_some());
}

#[test]
fn a_retry_skips_images_already_present() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    let template = json!({"nodeNames": ["a"], "images": ["app:latest", "db:latest"], "failureTolerate": "0"});
    world.give(with_spec(template.clone(), json!({"retry": 1}), 1, None));
    let mut half = result(TaskOutcome::Failed);
    half.images = vec![result(TaskOutcome::Succeeded).images[0].clone(), half.images[0].clone()];
    world.says("a", EdgeMessage::Result(half));
    world.pass(1_000);
    assert_eq!(world.dispatched.len(), 2);
    assert_eq!(world.there, [vec![], vec![0]]);
}

#[test]
fn newly_eligible_nodes_join_a_following_job() {
    let select = json!({"labelSelector": {"matchLabels": {"pool": "a"}}, "concurrency": 10});
    for follow in [true, false] {
        let mut world = World::new(&["out"]);
        let pool = |name: &str, ready| {
            let mut node = edge(name);
            node.labels.insert("pool".to_owned(), "a".to_owned());
            NodeView { ready, ..node }
        };
        for (name, ready) in [("in", true), ("later", false)] {
            world.hear(FleetEvent::Node(pool(name, ready)));
        }
        for node in ["in", "later", "out", "new"] {
            world.up(node, &[]);
        }
        world.give(with_spec(select.clone(), json!({"followNodes": follow}), 1, None));
        assert_eq!((world.taken(), world.status().skipped_nodes.len()), (vec!["in".to_owned()], 1));
        world.hear(FleetEvent::Node(pool("later", true)));
        world.hear(FleetEvent::Node(pool("out", true)));
        world.hear(FleetEvent::Node(pool("new", true)));
        world.pass(1_000);
        world.pass(1_000);
        let joined: &[&str] = if follow { &["later", "out", "new"] } else { &[] };
        assert_eq!(world.taken(), joined);
        assert_eq!(world.status().summary.desired as usize, 1 + joined.len());
        assert_eq!(world.status().skipped_nodes.is_empty(), follow);
        // It is over only when they are.
        world.ends("in", TaskOutcome::Succeeded);
        world.pass(1_000);
        assert_eq!(world.status().completion_time.is_some(), !follow);
    }
}

#[test]
fn two_jobs_take_turns_on_a_node() {
    for (limit, together) in [(None, 1), (Some(2), 2)] {
        let mut world = World::new(&["a"]);
        let hello = Hello { max_tasks: limit, ..Hello::default() };
        let up = SessionEvent::Up { node: "a".into(), session: SessionId(1), hello: Box::new(hello) };
        world.sessions = 1;
        world.hear(FleetEvent::Session(up));
        let other = |input: Input| match input {
            Input::Job(Ok(mut job)) => {
                job.metadata.uid = Some("uid-2".to_owned());
                job.metadata.name = Some("other".to_owned());
                Input::Job(Ok(job))
            }
            other => other,
        };
        world.give(on(&["a"]));
        world.give(other(on(&["a"])));
        world.pass(1_000);
        assert_eq!(world.taken().len(), together, "{limit:?}");
        world.ends("a", TaskOutcome::Succeeded);
        world.pass(1_000);
        assert_eq!(world.taken().len(), 2 - together);
    }
}

#[test]
fn a_deleted_job_frees_its_slot() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(on(&["a"]));
    let Input::Job(Ok(mut other)) = on(&["a"]) else { panic!() };
    other.metadata.uid = Some("uid-2".to_owned());
    world.give(Input::Job(Ok(other)));
    world.pass(1_000);
    assert_eq!(world.taken().len(), 1);
    world.give(Input::JobGone(JobUid(UID.to_owned())));
    world.pass(1_000);
    assert_eq!(world.taken().len(), 1);
}

#[test]
fn a_large_job_resumes_from_its_reports() {
    let (mut world, nodes) = fleet(600);
    let all = json!({"nodeNames": nodes, "concurrency": 600});
    world.give(job(all.clone(), 1, None));
    assert_eq!(world.taken().len(), 600);
    let lengths: Vec<_> = world.reports.values().map(|report| report.node_status.len()).collect();
    assert_eq!((lengths, world.status().node_status.len()), (vec![250, 250, 100], 200));
    let (done, running) = nodes.split_at(400);
    world.all_end(done, TaskOutcome::Succeeded);
    let stored = world.status().clone();
    world.restart(&nodes);
    world.give(job(all, 1, Some(&stored)));
    for node in running {
        world.up(node, &[(UID, 1, OpenPhase::Running)]);
    }
    assert!(world.taken().is_empty());
    world.all_end(running, TaskOutcome::Succeeded);
    assert_eq!((world.status().phase, world.status().summary.successful), (JobPhase::Completed, 600));
    assert_eq!(world.acks(), 600);
}

#[test]
fn a_deleted_reports_edges_are_asked() {
    let (mut world, nodes) = fleet(300);
    let all = json!({"nodeNames": nodes, "concurrency": 300});
    world.give(job(all.clone(), 1, None));
    world.pass(1_000);
    let stored = world.status().clone();
    world.reports.remove(&0);
    world.restart(&nodes);
    world.give(job(all, 1, Some(&stored)));
    for node in &nodes {
        world.up(node, &[(UID, 1, OpenPhase::Running)]);
    }
    world.pass(1_000);
    assert_eq!(world.status().summary.in_progress, 300);
    assert_eq!(world.reports.values().map(|report| report.node_status.len()).sum::<usize>(), 300);
    world.all_end(&nodes, TaskOutcome::Succeeded);
    assert_eq!(world.status().phase, JobPhase::Completed);
}

#[test]
fn a_job_holds_without_its_started_spec() {
    let (mut world, nodes) = fleet(2);
    let of = |image: &str| json!({"nodeNames": nodes, "concurrency": 1, "images": [image]});
    world.give(job(of("nginx:1.25"), 1, None));
    world.pass(1_000);
    let stored = world.status().clone();
    let stored = ImagePrePullJobStatus { started_spec: String::new(), ..stored };
    world.restart(&nodes);
    world.give(job(of("redis:7"), 2, Some(&stored)));
    world.up("n0", &[(UID, 1, OpenPhase::Running)]);
    world.up("n1", &[]);
    world.ends("n0", TaskOutcome::Succeeded);
    world.pass(1_000);
    world.pass(1_000);
    assert_eq!((world.taken().len(), world.condition("Valid").0), (0, "False"));
    assert_eq!(world.status().summary.successful, 1);
    assert!(world.status().reason.contains("what the job began with is not known"));
    world.give(job(of("nginx:1.25"), 3, None));
    world.pass(1_000);
    assert_eq!((world.taken(), world.condition("Valid").0), (vec!["n1".to_owned()], "True"));
}

#[test]
fn a_jobs_end_follows_its_nodes_ends() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(on(&["a"]));
    world.pass(1_000);
    world.api_up = false;
    world.ends("a", TaskOutcome::Succeeded);
    for _ in 0..10 {
        world.pass(1_000);
        // Only the report is tried.
        assert_eq!(world.status().phase, JobPhase::InProgress);
    }
    let tried = world.tried.clone();
    assert!(tried.iter().rev().take(3).all(|object| *object == StatusOrReport::Report(0)), "{tried:?}");
    world.api_up = true;
    world.pass(5_000);
    world.pass(1_000);
    assert_eq!((world.status().phase, world.phase_of("a")), (JobPhase::Completed, NodePhase::Successful));
}

#[test]
fn a_large_jobs_progress_is_written_rarely() {
    let (mut world, nodes) = fleet(1000);
    let template = json!({"nodeNames": nodes, "concurrency": 1000, "images": ["nginx:1.25"]});
    world.give(job(template, 1, None));
    world.pass(2_000);
    let before = world.writes;
    for second in 0..20 {
        for node in &nodes {
            let moment = prepull_api::task::ImageProgress {
                bytes: Some(prepull_api::task::ByteProgress { done: second, total: 100 }),
                attempts: 1,
                ..prepull_api::task::ImageProgress::new(0, prepull_api::task::ImagePhase::Pulling)
            };
            let progress = TaskProgress { task: task(), images: vec![moment], waits: String::new() };
            let message = EdgeMessage::Progress(progress);
            let session = SessionId(world.sessions);
            let event = SessionEvent::Message { node: node.as_str().into(), session, message };
            world.controller.note_fleet_event(FleetEvent::Session(event), world.now);
        }
        world.pass(1_000);
    }
    // A status a second, and four reports a second at the most.
    let writes = world.writes - before;
    assert!((20..=20 + 4 * 20 + 4).contains(&writes), "{writes}");
}

#[test]
fn a_parked_job_can_be_retried() {
    let (mut world, nodes) = fleet(2);
    let template = json!({"nodeNames": nodes, "concurrency": 2, "failureTolerate": "0"});
    let spec = |retry| json!({"retry": retry, "ttlSecondsAfterFinished": 10_000});
    world.give(with_spec(template.clone(), spec(0), 1, None));
    world.ends("n0", TaskOutcome::Succeeded);
    world.ends("n1", TaskOutcome::Failed);
    world.pass(1_000);
    assert_eq!((world.status().phase, world.taken().len()), (JobPhase::Failure, 2));
    world.pass(3_600_000);
    let in_memory = |world: &World| (world.controller.jobs.len(), world.controller.parked.len());
    assert_eq!(in_memory(&world), (0, 1));
    assert_eq!(world.controller.phases().map(|(_, jobs)| jobs), [0, 0, 0, 1]);
    // What comes so late is let go.
    let acks = world.acks();
    world.ends("n1", TaskOutcome::Succeeded);
    assert_eq!((world.acks(), world.phase_of("n1")), (acks + 1, NodePhase::Failure));
    // A life of cloudcore that begins now does not load it either, and deletes it in time.
    let stored = world.status().clone();
    for _ in 0..2 {
        world.restart(&nodes);
        world.reports.iter().for_each(|(_, report)| assert_eq!(report.node_status.len(), 2));
        world.give(with_spec(template.clone(), spec(0), 1, Some(&stored)));
        assert_eq!(in_memory(&world), (0, 1));
    }
    for node in &nodes {
        world.up(node, &[]);
    }
    world.give(with_spec(template, spec(1), 2, Some(&stored)));
    world.pass(1_000);
    assert_eq!((in_memory(&world), world.taken()), ((1, 0), vec!["n1".to_owned()]));
    assert_eq!((world.status().phase, world.record("n1").attempt), (JobPhase::InProgress, 2));
    let mut result = result(TaskOutcome::Succeeded);
    result.task.attempt = 2;
    world.says("n1", EdgeMessage::Result(result));
    world.pass(1_000);
    assert_eq!((world.status().phase, world.status().summary.successful), (JobPhase::Completed, 2));
    world.pass(3_600_000);
    assert_eq!((in_memory(&world), world.deleted), ((0, 1), 0));
    world.pass(6_400_000);
    assert_eq!(world.deleted, 1);
    world.give(Input::JobGone(JobUid(UID.to_owned())));
    assert_eq!(in_memory(&world), (0, 0));
}

#[test]
fn a_retry_uses_the_present_nodes() {
    let (mut world, nodes) = fleet(3);
    let one_by_one = json!({"nodeNames": nodes, "concurrency": 1, "failureTolerate": "1"});
    world.give(with_spec(one_by_one.clone(), json!({}), 1, None));
    for node in &nodes {
        world.ends(node, TaskOutcome::Failed);
        world.pass(1_000);
    }
    assert_eq!((world.status().phase, world.taken().len()), (JobPhase::Completed, 3));
    // One goes offline and another one is deleted while no cloudcore runs.
    world.hear(FleetEvent::Session(SessionEvent::Down { node: "n0".into(), session: SessionId(1) }));
    world.hear(FleetEvent::NodeGone("n1".into()));
    world.give(with_spec(one_by_one, json!({"retry": 1}), 2, None));
    world.pass(1_000);
    assert_eq!(world.taken(), ["n2"]);
    assert!(world.record("n0").reason.contains("offline"), "{:?}", world.record("n0"));
    assert_eq!(world.phase_of("n1"), NodePhase::Unknown);
    world.up("n0", &[]);
    for node in ["n2", "n0"] {
        let mut result = result(TaskOutcome::Succeeded);
        result.task.attempt = 2;
        world.says(node, EdgeMessage::Result(result));
        world.pass(1_000);
    }
    assert_eq!((world.status().phase, world.status().summary.successful), (JobPhase::Completed, 2));
}

#[test]
fn a_dead_session_delays_no_other_node() {
    let (mut world, nodes) = fleet(2);
    world.dead = Some("n0".into());
    world.give(job(json!({"nodeNames": nodes, "concurrency": 1}), 1, None));
    for _ in 0..20 {
        world.pass(1_000);
    }
    // Tried once: its session is dead, though no message has reported that.
    assert_eq!(world.taken(), ["n0", "n1"]);
    assert_eq!(world.phase_of("n0"), NodePhase::Pending);
}

#[test]
fn passed_steps_do_not_fail_changed_waves() {
    let (mut world, nodes) = fleet(20);
    let template =
        |concurrency| json!({"nodeNames": nodes, "concurrency": concurrency, "failureTolerate": "0.1"});
    world.give(with_spec(template(10), json!({}), 1, None));
    let first = world.taken();
    world.ends(&first[0], TaskOutcome::Failed);
    world.pass(1_000);
    // One of twenty may fail, and one of the two of a first wave might not: but eleven have begun.
    let spec = json!({"rollout": {"steps": ["10%", "100%"]}});
    world.give(with_spec(template(10), spec, 2, None));
    world.pass(1_000);
    assert_eq!(world.status().phase, JobPhase::InProgress, "{}", world.status().reason);
    assert_eq!(world.status().rollout.as_ref().map(|wave| wave.step), Some(2));
}

#[test]
fn an_unseen_suspension_still_counts() {
    let (mut world, nodes) = fleet(1);
    let spec = |suspend| json!({"activeDeadlineSeconds": 60, "suspend": suspend});
    world.give(with_spec(template(&nodes), spec(true), 1, None));
    world.pass(100_000);
    let stored = world.status().clone();
    world.restart(&nodes);
    world.give(with_spec(template(&nodes), spec(false), 2, Some(&stored)));
    world.up("n0", &[]);
    world.pass(1_000);
    assert_eq!((world.status().phase, world.taken().len()), (JobPhase::InProgress, 1));
}

#[test]
fn running_nodes_get_a_longer_timeout() {
    let (mut world, nodes) = fleet(1);
    let of = |seconds| json!({"nodeNames": nodes, "timeoutSeconds": seconds});
    world.give(job(of(60), 1, None));
    world.says("n0", EdgeMessage::Accepted { task: task() });
    world.pass(10_000);
    world.give(job(of(600), 2, None));
    assert_eq!(world.taken(), ["n0", "n0"]);
    world.pass(100_000);
    assert_eq!(world.phase_of("n0"), NodePhase::InProgress);
}

#[test]
fn a_job_names_what_it_waits_for() {
    let names = ["n0".to_owned(), "n1".to_owned()];
    let one_by_one = json!({"nodeNames": names, "concurrency": 1, "failureTolerate": "0"});
    let mut world = World::new(&["n0", "n1"]);
    world.give(with_spec(one_by_one.clone(), json!({"activeDeadlineSeconds": 60}), 1, None));
    world.pass(5_000);
    assert_eq!(world.status().reason, "waiting for 2 offline nodes");
    world.up("n0", &[]);
    world.pass(5_000);
    assert_eq!(world.status().reason, "", "one works, and another will when it is back");
    world.pass(60_000);
    world.pass(1_000);
    assert_eq!(world.record("n1").reason, "not started: the time of the job was over");
    assert!(world.record("n0").reason.contains("activeDeadlineSeconds (60)"), "{:?}", world.record("n0"));
    assert!(world.status().reason.starts_with("activeDeadlineSeconds (60) is over; 1 node"));

    let (mut world, _) = fleet(2);
    world.give(with_spec(one_by_one, json!({}), 1, None));
    world.ends("n0", TaskOutcome::Failed);
    world.pass(1_000);
    assert_eq!(world.record("n1").reason, "not started: more nodes failed than failureTolerate allows");
}
