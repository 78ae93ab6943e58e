//! Jobs that an earlier leader has begun, as a new one reads them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::course::fleet;
use super::*;

fn object(input: Input) -> JobObject {
    let Input::Job(object) = input else { panic!("{input:?}") };
    object
}

#[test]
fn a_lean_job_yields_no_status() {
    let (mut world, nodes) = fleet(2);
    let mut wanted = json!({"nodeNames": nodes, "concurrency": 1});
    world.give(job(wanted.clone(), 1, None));
    world.pass(1_000);
    world.ends("n0", TaskOutcome::Succeeded);
    let whole = object(job(wanted.clone(), 1, world.stored.as_ref()));
    let mut listed = whole.clone();
    drop_unread_fields(&mut listed, world.now);
    world.restart_unread(&nodes);
    world.controller.handle(Input::Jobs(vec![listed]), world.now);
    let recalled = world.controller.flush(world.now);
    assert!(matches!(recalled[..], [Action::Recall { .. }]), "{recalled:?}");
    assert!(world.controller.is_loading(), "no edge may be let in");
    // It's edited while it is read.
    wanted["concurrency"] = json!(2);
    world.controller.handle(job(wanted, 2, world.stored.as_ref()), world.now);
    assert!(world.controller.flush(world.now).is_empty());
    let reports = world.stored_reports();
    world.give(Input::Recalled(JobUid(UID.to_owned()), reports, Some(whole)));
    assert!(!world.controller.is_loading());
    world.up("n0", &[]);
    world.up("n1", &[(UID, 1, OpenPhase::Running)]);
    world.ends("n1", TaskOutcome::Succeeded);
    world.pass(2_000);
    assert_eq!((world.status().phase, world.status().node_status.len()), (JobPhase::Completed, 2));
    assert_eq!(world.status().observed_generation, Some(2));
}

impl World {
    fn restart_unread(&mut self, nodes: &[String]) {
        self.controller = Controller::default();
        self.hear(FleetEvent::Nodes(nodes.iter().map(|name| edge(name)).collect()));
    }
}

#[test]
fn of_listed_jobs_the_oldest_begins_first() {
    let mut world = World::new(&["a"]);
    world.up("a", &[]);
    let made = |name: &str, created: i64| {
        let mut job = object(job(json!({"nodeNames": ["a"], "images": [name]}), 1, None)).unwrap();
        job.metadata.uid = Some(name.to_owned());
        job.metadata.creation_timestamp = Some(Time(Timestamp::from_second(created).unwrap()));
        Ok(job)
    };
    world.give(Input::Jobs(vec![made("younger:1", 2), made("older:1", 1)]));
    world.pass(1_000);
    assert_eq!(world.images, ["older:1"]);
}

#[test]
fn loading_does_not_wait_for_deleted_jobs() {
    let (mut world, nodes) = fleet(1);
    world.give(job(json!({"nodeNames": nodes}), 1, None));
    world.pass(1_000);
    let listed = object(job(json!({"nodeNames": nodes}), 1, world.stored.as_ref()));
    world.restart_unread(&nodes);
    world.controller.handle(Input::Jobs(vec![listed]), world.now);
    world.controller.handle(Input::Recalled(JobUid(UID.to_owned()), Vec::new(), None), world.now);
    assert!(!world.controller.is_loading());
}

#[test]
fn a_deleted_job_stays_deleted() {
    let (mut world, nodes) = fleet(1);
    let wanted = |generation, status| {
        let template = json!({"nodeNames": nodes, "failureTolerate": "0"});
        with_spec(template, json!({"pin": true}), generation, status)
    };
    world.give(wanted(1, None));
    world.pass(1_000);
    let edited = wanted(2, world.stored.as_ref());
    world.give(Input::JobGone(JobUid(UID.to_owned())));
    // A write read the edit before the deletion, and delivers it after it.
    world.controller.handle(edited, world.now);
    let recalled = world.controller.flush(world.now);
    assert!(matches!(recalled[..], [Action::Recall { .. }]), "{recalled:?}");
    world.controller.handle(Input::Recalled(JobUid(UID.to_owned()), Vec::new(), None), world.now);
    assert_eq!(world.controller.phases().map(|(_, jobs)| jobs), [0; 4]);
    world.sent.clear();
    world.up_with("n0", &[], Hello { pins: Some(vec![JobUid(UID.to_owned())]), ..Hello::default() });
    assert!(world.sent.iter().any(|(_, message)| matches!(message, CloudMessage::Unpin { .. })));
    // Of a write that was in flight nothing is kept either.
    world.controller.handle(
        Input::Written {
            job: JobUid(UID.to_owned()),
            object: StatusOrReport::Status,
            version: 1,
            outcome: WriteOutcome::Gone,
            stored: None,
        },
        world.now,
    );
    assert!(world.controller.gone.is_empty());
}

#[test]
fn what_the_watch_says_late_undoes_nothing() {
    let (mut world, nodes) = fleet(1);
    let wanted = |suspend| {
        with_spec(json!({"nodeNames": nodes}), json!({"suspend": suspend}), 1 + i64::from(suspend), None)
    };
    world.give(wanted(false));
    world.give(wanted(true));
    world.give(wanted(false));
    world.pass(1_000);
    assert_eq!((world.condition("Suspended").0, world.status().observed_generation), ("True", Some(2)));
}

#[test]
fn a_write_replaces_the_last_stored_version() {
    let mut controller = Controller::default();
    let now = Timestamp::from_second(1_000_000).unwrap();
    controller.note_fleet_event(FleetEvent::Nodes(vec![edge("n0")]), now);
    let mut wanted = object(job(json!({"nodeNames": ["n0"]}), 1, None));
    wanted.as_mut().unwrap().metadata.resource_version = Some("5".to_owned());
    controller.handle(Input::Job(wanted), now);
    // What is due is written, one version after the other.
    let mut stored = 5;
    let mut replaced = Vec::new();
    for second in 0..6 {
        let now = now + Duration::from_secs(second);
        controller.handle(Input::ReportGone { job: JobUid(UID.to_owned()), index: 0 }, now);
        for action in controller.flush(now) {
            let Action::Write { job, version, replaces, content, .. } = action else { continue };
            stored += 1;
            let (object, outcome) = (content.object(), WriteOutcome::Done);
            replaced.push((object, replaces, stored.to_string()));
            let stored = Some(stored.to_string());
            controller.handle(Input::Written { job, object, version, outcome, stored }, now);
        }
    }
    for (object, first) in [(StatusOrReport::Status, Some("5".to_owned())), (StatusOrReport::Report(0), None)]
    {
        let mut known = first;
        let of_object: Vec<_> = replaced.iter().filter(|(of, ..)| *of == object).collect();
        assert!(!of_object.is_empty(), "{replaced:?}");
        for (_, replaces, stored) in of_object {
            assert_eq!(*replaces, known, "{replaced:?}");
            known = Some(stored.clone());
        }
    }
}
