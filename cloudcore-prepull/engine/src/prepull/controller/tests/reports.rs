//! Reports that a user deletes.

use super::*;

fn job_uid() -> JobUid {
    JobUid(UID.to_owned())
}

/// An ended job with one node, which has succeeded.
fn over() -> World {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    world.give(on(&["a"]));
    world.ends("a", TaskOutcome::Succeeded);
    world.pass(2_000);
    assert_eq!(world.status().phase, JobPhase::Completed);
    world
}

#[test]
fn a_deleted_report_is_rewritten_from_memory() {
    let mut world = over();
    let report = world.reports.remove(&0).unwrap();
    let (writes, dispatched) = (world.writes, world.dispatched.len());
    world.give(Input::ReportGone { job: job_uid(), index: 0 });
    world.pass(2_000);
    assert_eq!(world.reports.get(&0), Some(&report));
    assert_eq!((world.writes, world.dispatched.len()), (writes + 1, dispatched));
}

#[test]
fn a_report_deleted_unseen_is_rewritten() {
    let mut world = over();
    world.reports.clear();
    world.give(Input::ReportsListed(Vec::new()));
    world.pass(2_000);
    assert_eq!(world.reports.len(), 1);
    let writes = world.writes;
    world.give(Input::ReportsListed(vec![(job_uid(), 0)]));
    world.pass(2_000);
    assert_eq!(world.writes, writes, "it is there");
}

#[test]
fn an_unwritten_report_is_no_lost_one() {
    let mut world = World::new(&["a"]);
    world.answers = false;
    world.give(on(&["a"]));
    // The status, and with that the report.
    for written in std::mem::take(&mut world.unanswered) {
        world.give(written);
    }
    world.give(Input::ReportsListed(Vec::new()));
    world.answer();
    world.pass(2_000);
    assert_eq!(world.tried, [StatusOrReport::Status, StatusOrReport::Report(0)]);
}

#[test]
fn nothing_reruns_after_deletion_and_failover() {
    let mut world = World::new(&["a", "b"]);
    world.up("a", &[]);
    world.give(on(&["a", "b"]));
    world.ends("a", TaskOutcome::Succeeded);
    world.pass(2_000);
    world.reports.clear();
    world.give(Input::ReportGone { job: job_uid(), index: 0 });
    world.pass(2_000);
    let (object, stored) = (world.object.clone().unwrap().unwrap(), world.stored.clone());
    world.boot(&["a", "b"]);
    let mut object = *object;
    object.status = stored;
    world.give(Input::Job(Ok(Box::new(object))));
    world.dispatched.clear();
    world.up("a", &[]);
    world.pass(2_000);
    assert_eq!((world.phase_of("a"), world.dispatched.len()), (NodePhase::Successful, 0));
}

impl World {
    /// All reports are lost, and the next leader reads the job, which was edited since.
    fn lose_reports(&mut self, nodes: &[String]) {
        self.reports.clear();
        let mut object = *self.object.clone().unwrap().unwrap();
        object.metadata.generation = object.metadata.generation.map(|generation| generation + 1);
        object.spec.ttl_seconds_after_finished = Some(86_400);
        object.status.clone_from(&self.stored);
        self.boot(&nodes.iter().map(String::as_str).collect::<Vec<_>>());
        self.give(Input::Job(Ok(Box::new(object))));
        self.pass(5_000);
    }
}

#[test]
fn lost_reports_come_back_from_the_status() {
    let mut world = over();
    let (reports, status) = (world.reports.clone(), world.status().clone());
    world.dispatched.clear();
    world.lose_reports(&["a".to_owned()]);
    assert_eq!(world.reports[&0].node_status, reports[&0].node_status);
    let after = world.status();
    assert_eq!((after.observed_generation, &after.summary), (Some(2), &status.summary));
    assert!(world.dispatched.is_empty());
}

/// An ended job with more nodes than a status shows, and with one failed node.
fn large_and_over() -> (World, Vec<String>) {
    let (mut world, nodes) = super::course::fleet(MAX_NODES_IN_STATUS + 1);
    world.run_to_the_end(&nodes, "app:1", 1);
    (world, nodes)
}

impl World {
    fn run_to_the_end(&mut self, nodes: &[String], image: &str, generation: i64) {
        let template =
            json!({"nodeNames": nodes, "concurrency": 1000, "failureTolerate": "1", "images": [image]});
        self.give(with_spec(template, json!({"pin": true}), generation, None));
        self.pass(1_000);
        for (at, node) in nodes.iter().enumerate() {
            let task = TaskId { attempt: self.record(node).attempt, ..task() };
            let outcome = if at == 0 { TaskOutcome::Failed } else { TaskOutcome::Succeeded };
            self.says(node, EdgeMessage::Result(TaskResult { task, ..result(outcome) }));
        }
        self.pass(60_000);
        assert_eq!((self.status().phase, self.status().summary.failure), (JobPhase::Completed, 1));
    }
}

#[test]
fn a_node_whose_record_is_lost_keeps_its_pins() {
    let (mut world, nodes) = large_and_over();
    world.run_to_the_end(&nodes, "app:2", 2);
    world.lose_reports(&nodes);
    world.sent.clear();
    for node in &nodes {
        world.up_with(node, &[], Hello { pins: Some(vec![job_uid()]), ..Hello::default() });
    }
    let is_unpin = |(_, message): &(NodeName, CloudMessage)| matches!(message, CloudMessage::Unpin { .. });
    assert!(!world.sent.iter().any(is_unpin));
}

#[test]
fn a_round_counts_its_own_although_reports_were_lost() {
    let (mut world, nodes) = large_and_over();
    world.lose_reports(&nodes);
    assert_eq!(world.status().summary.failure, 1);
    let template = json!({"nodeNames": nodes, "concurrency": 1000, "failureTolerate": "1"});
    world.give(with_spec(template, json!({"retry": 1}), 3, None));
    world.pass(1_000);
    assert_eq!((world.status().phase, world.status().summary.failure), (JobPhase::InProgress, 0));
}

#[test]
fn an_edit_is_observed_although_reports_are_lost() {
    let (mut world, nodes) = large_and_over();
    let status = world.status().clone();
    world.lose_reports(&nodes);
    let after = world.status().clone();
    assert_eq!(after.observed_generation, Some(2));
    let counts = |status: &ImagePrePullJobStatus| (status.summary.clone(), status.failures_by_code.clone());
    assert_eq!(counts(&after), counts(&status));
    assert_eq!(after.node_status, status.node_status);
}

#[test]
fn reports_of_other_jobs_are_ignored() {
    let mut world = over();
    let writes = world.writes;
    world.give(Input::ReportGone { job: job_uid(), index: 7 });
    world.give(Input::ReportGone { job: JobUid("another".to_owned()), index: 0 });
    world.pass(2_000);
    assert_eq!(world.writes, writes);
}

#[test]
fn the_most_advanced_of_two_records_counts() {
    let mut world = over();
    // A write of a cloudcore that was killed, which arrived after its successor had put the node elsewhere.
    let mut late = world.reports[&0].clone();
    late.node_status[0] = NodeStatus { node_name: "a".to_owned(), ..NodeStatus::default() };
    let mut report = world.reports[&0].clone();
    report.index = 1;
    world.reports = BTreeMap::from([(0, late), (1, report)]);
    let (object, stored) = (world.object.clone().unwrap().unwrap(), world.stored.clone());
    world.boot(&["a"]);
    world.give(Input::Job(Ok(Box::new(ImagePrePullJob { status: stored, ..*object }))));
    world.pass(2_000);
    let records = |index| world.reports[&index].node_status.iter().map(|node| node.phase).collect::<Vec<_>>();
    assert_eq!((records(0), records(1)), (vec![], vec![NodePhase::Successful]));
}
