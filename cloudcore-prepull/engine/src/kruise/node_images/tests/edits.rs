#![allow(clippy::unwrap_used)]
//! What jobs ask for, and what is taken out again.

use super::*;

fn live(world: &World, job: &str, liveness: Liveness) {
    world.jobs.borrow_mut().insert(JobUid(job.to_owned()), liveness);
}

#[test]
fn a_wish_is_written_pulled_and_answered() {
    let mut world = World::new();
    live(&world, "job", Liveness::Active);
    let wish = Arc::new(wish("job"));
    world.ask(&wish, false);
    let tag = world.spec_tag("nginx", "1.25").unwrap();
    assert_eq!((tag.version, tag.pull_policy.as_ref()), (0, Some(&wish.limits)));
    assert_eq!(tag.owner_references.iter().collect::<Vec<_>>(), [&wish.owner]);
    assert_eq!(world.standings(), [("job".to_owned(), Standing::Open)]);
    let task = world.sent()[0].task.id.clone();
    let at = Timestamp::from_second(world.now.as_second()).unwrap();
    world.ends(&task, pulled());
    assert_eq!(world.standings(), [("job".to_owned(), Standing::Succeeded(at))]);
    world.ask(&wish, false);
    assert_eq!(world.standings(), [("job".to_owned(), Standing::Succeeded(at))], "each ask has its answer");
    assert_eq!(world.sent(), []);
}

#[test]
fn a_further_round_raises_the_version() {
    let mut world = World::new();
    live(&world, "job", Liveness::Active);
    let wish = Arc::new(wish("job"));
    world.ask(&wish, false);
    let task = world.sent()[0].task.id.clone();
    world.ask(&wish, true);
    assert_eq!(world.spec_tag("nginx", "1.25").unwrap().version, 0, "the first has not ended");
    world.ends(&task, failed("no"));
    world.ask(&wish, true);
    assert_eq!(world.spec_tag("nginx", "1.25").unwrap().version, 1);
    assert_eq!(world.sent()[0].task.id.attempt, 2);
    let standings = world.standings();
    assert_eq!(standings.last(), Some(&("job".to_owned(), Standing::Open)), "{standings:?}");
}

#[test]
fn a_second_job_raises_the_version_and_both_are_told() {
    let mut world = World::new();
    for job in ["one", "two"] {
        live(&world, job, Liveness::Active);
        world.ask(&Arc::new(wish(job)), false);
    }
    let tag = world.spec_tag("nginx", "1.25").unwrap();
    assert_eq!((tag.version, tag.owner_references.len()), (1, 2));
    let first = world.sent()[0].task.id.clone();
    world.ends(&first, pulled());
    let second = world.sent()[0].task.id.clone();
    world.standings();
    world.ends(&second, pulled());
    world.pass(Duration::from_secs(1));
    let mut told = world.standings();
    told.sort_by(|a, b| a.0.cmp(&b.0));
    assert!(
        matches!(told.as_slice(), [(one, Standing::Succeeded(_)), (two, Standing::Succeeded(_))] if one == "one" && two == "two"),
        "{told:?}"
    );
}

#[test]
fn a_changed_wish_changes_what_is_open() {
    let mut world = World::new();
    live(&world, "job", Liveness::Active);
    world.ask(&Arc::new(wish("job")), false);
    let mut changed = wish("job");
    changed.limits.timeout_seconds = Some(60);
    world.ask(&Arc::new(changed), false);
    assert_eq!(world.spec_tag("nginx", "1.25").unwrap().pull_policy.unwrap().timeout_seconds, Some(60));
    let sent = world.sent();
    assert_eq!(sent.last().unwrap().task.images[0].timeout, Some(Duration::from_secs(60)));
}

#[test]
fn a_job_whose_image_was_changed_does_not_own_the_old_one() {
    let mut world = World::new();
    live(&world, "job", Liveness::Active);
    world.ask(&Arc::new(wish("job")), false);
    world.ask(&Arc::new(Wish { tag: "1.26".to_owned(), ..wish("job") }), false);
    assert_eq!(world.spec_tag("nginx", "1.25"), None);
    assert!(world.spec_tag("nginx", "1.26").is_some());
}

#[test]
fn time_to_live_removes_a_tag_from_spec_and_status() {
    let mut world = World::new();
    world.edit(|spec| by_hand(spec, "ubuntu", "latest"));
    let task = world.sent()[0].task.id.clone();
    world.ends(&task, pulled());
    world.pass(Duration::from_secs(298));
    assert!(world.spec_tag("ubuntu", "latest").is_some());
    world.pass(Duration::from_secs(2));
    assert_eq!(world.object.as_ref().unwrap().spec, NodeImageSpec::default());
    assert_eq!(world.status(), NodeImageStatus::default());
}

#[test]
fn a_tag_stays_while_a_job_counts_on_it_and_goes_with_its_last_owner() {
    let mut world = World::new();
    live(&world, "job", Liveness::Active);
    world.ask(&Arc::new(wish("job")), false);
    let task = world.sent()[0].task.id.clone();
    world.ends(&task, pulled());
    world.pass(Duration::from_secs(10_000));
    assert!(world.spec_tag("nginx", "1.25").is_some(), "beyond its 600 s: the job runs");
    live(&world, "job", Liveness::Over);
    world.tell(Input::Liveness(JobUid("job".to_owned())));
    assert_eq!(world.spec_tag("nginx", "1.25"), None);

    world.ask(&Arc::new(wish("job")), false);
    assert_eq!(world.spec_tag("nginx", "1.25"), None, "nobody waits for it any more");
    live(&world, "job", Liveness::Active);
    world.ask(&Arc::new(wish("job")), false);
    live(&world, "job", Liveness::Gone);
    world.tell(Input::Liveness(JobUid("job".to_owned())));
    assert_eq!(world.spec_tag("nginx", "1.25"), None, "before its time");
    let said = world.said();
    assert!(matches!(said.last(), Some(CloudMessage::Cancel { .. })), "{said:?}");
}

#[test]
fn a_tag_by_hand_and_an_owner_of_another_kind_are_left_alone() {
    let mut world = World::new();
    let stranger = ObjectReference {
        api_version: Some("example.io/v1".to_owned()),
        kind: Some("Thing".to_owned()),
        uid: Some("t".to_owned()),
        ..ObjectReference::default()
    };
    world.edit(|spec| {
        by_hand(spec, "a", "1");
        by_hand(spec, "b", "1");
        spec.images.get_mut("b").unwrap().tags[0].owner_references.push(stranger.clone());
    });
    world.tell(Input::Liveness(JobUid("t".to_owned())));
    assert_eq!(world.spec_tag("b", "1").unwrap().owner_references, [stranger]);
    assert!(world.spec_tag("a", "1").is_some());
}

#[test]
fn nothing_of_an_edit_by_hand_is_lost_to_a_write_at_the_same_time() {
    let mut world = World::new();
    live(&world, "job", Liveness::Active);
    world.edit_unseen(|spec| by_hand(spec, "ubuntu", "latest"));
    world.ask(&Arc::new(wish("job")), false);
    assert!(world.spec_tag("ubuntu", "latest").is_some() && world.spec_tag("nginx", "1.25").is_some());
    assert_eq!(world.standings(), [("job".to_owned(), Standing::Open)]);
}

#[test]
fn a_full_node_image_tells_the_job() {
    let mut world = World::new();
    live(&world, "job", Liveness::Active);
    world.edit(|spec| (0..256).for_each(|n| by_hand(spec, &format!("i{n}"), "1")));
    world.standings();
    world.ask(&Arc::new(wish("job")), false);
    let told = world.standings();
    assert!(matches!(told.as_slice(), [(_, Standing::Failed(_))]), "{told:?}");
}
