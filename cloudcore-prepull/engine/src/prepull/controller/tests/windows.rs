//! Windows: when nodes start, what their time counts, and changes of the terms while they are at work.

use prepull_api::crd::status::NodeClock;
use prepull_api::download::Window;
use prepull_api::failure::FailureCode;
use prepull_api::settings::NodeSettings;
use prepull_window::parse_window;
use serde_json::Value;

use super::course::fleet;
use super::*;

/// It is 13:46:40 UTC on Monday, 12 January 1970, when the tests begin.
fn job_with(
    nodes: &[String],
    beside: Value,
    generation: i64,
    status: Option<&ImagePrePullJobStatus>,
) -> Input {
    let template =
        json!({"nodeNames": nodes, "concurrency": 100, "timeoutSeconds": 300, "failureTolerate": "1"});
    with_spec(template, beside, generation, status)
}

fn windows(windows: &[&str]) -> Value {
    let window = |text: &&str| {
        let window = parse_window(text).unwrap();
        let days: Vec<_> = window.days.iter().map(|day| day.as_str()).collect();
        let duration = prepull_window::write_duration(window.duration);
        json!({ "days": days, "start": window.start.to_string(), "duration": duration,
            "timeZone": window.time_zone.to_string() })
    };
    json!({ "windows": windows.iter().map(window).collect::<Vec<_>>() })
}

impl World {
    /// Passes the time until then, from one moment to the next at which the controller wants to be called.
    fn pass_until(&mut self, time: &str) {
        let end: Timestamp = format!("1970-01-12T{time}Z").parse().unwrap();
        while let Some(next) = self.controller.next_wakeup().filter(|next| *next <= end) {
            self.now = self.now.max(next);
            self.settle();
        }
        self.now = end;
        self.settle();
    }
}

#[test]
fn a_node_starts_when_its_window_opens() {
    let (mut world, nodes) = fleet(2);
    world.give(job_with(&nodes, windows(&["Mon 14:00+10m UTC", "Tue 05:00+1h UTC"]), 1, None));
    world.pass_until("13:59:59");
    assert_eq!(world.taken(), Vec::<String>::new());
    let waits = "waits for its window, opens at 14:00 UTC (Mon 12 Jan)";
    assert_eq!((world.phase_of("n0"), world.record("n0").reason.as_str()), (NodePhase::Pending, waits));
    assert_eq!(world.status().reason, format!("2 nodes waiting; the first {waits}"));
    world.pass_until("14:00:01");
    assert_eq!(world.taken(), ["n0", "n1"]);
    let start = world.record("n0").start_time.as_ref().unwrap().0;
    assert_eq!((start.to_string().as_str(), world.status().reason.as_str()), ("1970-01-12T14:00:00Z", ""));
    assert_eq!(world.remaining[0], Duration::from_secs(300));
    assert_eq!(world.terms[0].windows.len(), 2);
}

#[test]
fn node_time_counts_only_inside_windows() {
    let (mut world, nodes) = fleet(2);
    let windows = windows(&["14:00+2m UTC", "15:00+2m UTC", "16:00+2m UTC"]);
    world.give(job_with(&nodes, windows.clone(), 1, None));
    world.pass_until("14:01:00");
    assert_eq!(world.taken(), ["n0", "n1"]);
    world.pass_until("15:30:00");
    assert_eq!((world.phase_of("n0"), world.phase_of("n1")), (NodePhase::InProgress, NodePhase::InProgress));
    // An edge that has lost its keys gets the rest of its time.
    world.up("n0", &[(UID, 1, OpenPhase::NeedsKeys)]);
    assert_eq!(
        (world.taken(), world.remaining.last()),
        (vec!["n0".to_owned()], Some(&Duration::from_secs(60)))
    );
    let stored = world.status().clone();
    world.restart(&nodes);
    world.give(job_with(&nodes, windows, 1, Some(&stored)));
    world.pass_until("16:01:01");
    assert_eq!(world.phase_of("n1"), NodePhase::InProgress);
    world.pass_until("16:01:03");
    assert_eq!(
        (world.phase_of("n1"), world.record("n1").code),
        (NodePhase::Unknown, Some(FailureCode::Offline))
    );
}

#[test]
fn an_offline_nodes_zone_survives_failover() {
    // 20:00 in Kolkata is 14:30 UTC.
    let (mut world, nodes) = fleet(1);
    let hello = Hello { time_zone: Some("Asia/Kolkata".to_owned()), ..Hello::default() };
    world.up_with("n0", &[], hello);
    let windows = windows(&["20:00+4m Node", "21:00+4m Node"]);
    world.give(job_with(&nodes, windows.clone(), 1, None));
    world.pass_until("14:29:00");
    let waits = "waits for its window, opens at 20:00 Asia/Kolkata (Mon 12 Jan)";
    assert_eq!((world.taken(), world.record("n0").reason.as_str()), (vec![], waits));
    world.pass_until("14:31:00");
    assert_eq!(world.taken(), ["n0"]);
    let clock = NodeClock { time_zone: Some("Asia/Kolkata".to_owned()), windows: Vec::new() };
    assert_eq!(world.record("n0").clock, Some(clock));
    let stored = world.status().clone();
    world.restart(&nodes);
    world.give(job_with(&nodes, windows, 1, Some(&stored)));
    world.pass_until("15:31:01");
    assert_eq!(world.phase_of("n0"), NodePhase::InProgress);
    world.pass_until("15:31:03");
    let record = world.record("n0");
    assert_eq!((record.phase, &record.clock), (NodePhase::Unknown, &None));
}

#[test]
fn a_nodes_own_windows_always_apply() {
    for (of_job, opens) in [(json!({}), "14:00"), (windows(&["14:01+1h UTC"]), "14:01")] {
        let (mut world, nodes) = fleet(1);
        let windows = vec![parse_window("14:00+2m UTC").unwrap(), parse_window("17:00+2m UTC").unwrap()];
        world.up_with("n0", &[], Hello { windows, ..Hello::default() });
        world.give(job_with(&nodes, of_job, 1, None));
        world.pass_until("13:59:59");
        assert!(world.taken().is_empty());
        let reason = &world.record("n0").reason;
        assert!(reason.contains(&format!("opens at {opens} UTC")), "{reason}");
        world.pass_until(&format!("{opens}:01"));
        assert_eq!(world.taken(), ["n0"]);
        world.pass_until("16:59:59");
        assert_eq!(world.phase_of("n0"), NodePhase::InProgress);
        // The edge no longer has windows of its own.
        world.up("n0", &[(UID, 1, OpenPhase::Running)]);
        world.pass_until("17:00:00");
        assert_eq!(world.phase_of("n0"), NodePhase::Unknown, "its time was over long ago");
    }
}

#[test]
fn each_node_starts_after_its_delay() {
    let (mut world, nodes) = fleet(20);
    let mut beside = windows(&["14:00+1h UTC"]);
    beside["windowJitter"] = json!("20m");
    world.give(job_with(&nodes, beside, 1, None));
    world.pass_until("14:10:00");
    let early = world.taken().len();
    assert!((3..17).contains(&early), "{early}");
    world.pass_until("14:20:01");
    assert_eq!(early + world.taken().len(), 20);
    for (node, terms) in nodes.iter().zip(&world.terms) {
        assert!(terms.delay <= Duration::from_secs(1200), "{node}");
    }
    let opened = |node: &str| world.record(node).start_time.as_ref().unwrap().0;
    let opening: Timestamp = "1970-01-12T14:00:00Z".parse().unwrap();
    let delays: Vec<_> = nodes.iter().map(|node| opened(node).duration_since(opening)).collect();
    let told: Vec<_> = world.terms.iter().map(|terms| terms.delay).collect();
    for delay in delays {
        assert!(
            told.iter().any(|told| told.as_secs() == delay.as_secs().unsigned_abs()),
            "{delay:?} {told:?}"
        );
    }
}

#[test]
fn a_changed_window_releases_waiting_nodes() {
    let (mut world, nodes) = fleet(2);
    world.give(job_with(&nodes, windows(&["20:00+10m UTC"]), 1, None));
    world.pass_until("14:00:00");
    assert!(world.taken().is_empty());
    world.give(job_with(&nodes, json!({}), 2, None));
    assert_eq!(world.taken(), ["n0", "n1"]);
    // And the other way round: running nodes get the change, and keep their time until the window opens again.
    world.give(job_with(&nodes, windows(&["20:00+10m UTC"]), 3, None));
    assert_eq!((world.taken(), world.terms[2].windows.len()), (vec!["n0".to_owned(), "n1".to_owned()], 1));
    world.pass_until("20:04:00");
    assert_eq!(world.phase_of("n0"), NodePhase::InProgress);
}

#[test]
fn running_nodes_get_changed_download_terms() {
    let (mut world, nodes) = fleet(2);
    world.give(job_with(&nodes, json!({"download": {"maxRate": "2Mi"}, "pin": true}), 1, None));
    assert_eq!(world.taken(), ["n0", "n1"]);
    world.ends("n1", TaskOutcome::Succeeded);
    world.give(job_with(&nodes, json!({"download": {"maxRate": "4Mi"}}), 2, None));
    assert_eq!(world.taken(), ["n0"]);
    let rates: Vec<_> = world.terms.iter().map(|terms| terms.max_rate.unwrap().get() >> 20).collect();
    let pins: Vec<_> = world.terms.iter().map(|terms| terms.pin).collect();
    assert_eq!((rates, pins), (vec![2, 2, 4], vec![true, true, false]));
    world.give(job_with(&nodes, json!({"download": {"maxRate": "fast"}}), 3, None));
    world.pass(1_000);
    assert_eq!(world.taken(), Vec::<String>::new());
    let valid = world.status().conditions.iter().find(|condition| condition.type_ == "Valid").unwrap();
    assert!(valid.status == "False" && valid.message.contains("spec.download.maxRate"), "{valid:?}");
    // Equal terms are not sent again.
    world.give(job_with(&nodes, json!({"download": {"maxRate": "4Mi"}}), 4, None));
    assert_eq!(world.taken(), Vec::<String>::new());
}

#[test]
fn a_node_shows_its_edges_wait() {
    let (mut world, nodes) = fleet(1);
    world.give(job_with(&nodes, json!({}), 1, None));
    let says = |waits: &str| {
        EdgeMessage::Progress(TaskProgress { task: task(), images: Vec::new(), waits: waits.to_owned() })
    };
    world.says("n0", says("waits for its window, opens at 01:00 UTC (Tue 13 Jan)"));
    world.pass(60_000);
    let record = world.record("n0");
    assert_eq!(record.reason, "waits for its window, opens at 01:00 UTC (Tue 13 Jan)");
    assert!(record.action_flow.is_empty(), "its checks have not run");
    world.says("n0", says(""));
    world.pass(60_000);
    assert_eq!(world.record("n0").reason, "");
}

#[test]
fn a_returning_edge_gets_changed_terms() {
    let (mut world, nodes) = fleet(1);
    let limited = json!({"download": {"maxRate": "2Mi"}});
    world.give(job_with(&nodes, limited, 1, None));
    assert_eq!(world.taken(), ["n0"]);
    let back = |world: &mut World, limited: bool| {
        world.sessions += 1;
        let open = vec![OpenTask { task: task(), phase: OpenPhase::Running, limited }];
        let (session, hello) = (SessionId(world.sessions), Box::new(Hello { open, ..Hello::default() }));
        world.hear(FleetEvent::Session(SessionEvent::Up { node: "n0".into(), session, hello }));
        (world.taken(), world.terms.last().unwrap().max_rate.is_some())
    };
    let told = vec!["n0".to_owned()];
    assert_eq!(back(&mut world, true), (told.clone(), true), "it may know an older limit");
    world.hear(FleetEvent::Session(SessionEvent::Down {
        node: "n0".into(),
        session: SessionId(world.sessions),
    }));
    world.give(job_with(&nodes, json!({}), 2, None));
    assert_eq!(world.taken(), Vec::<String>::new(), "it is away");
    assert_eq!(back(&mut world, true), (told.clone(), false));
    assert_eq!(back(&mut world, false), (vec![], false), "there is nothing to tell");
    let session = SessionId(world.sessions);
    world.hear(FleetEvent::Session(SessionEvent::Down { node: "n0".into(), session }));
    world.give(job_with(&nodes, json!({"download": {"maxRate": "2Mi"}}), 3, None));
    assert_eq!(back(&mut world, false), (told, true), "it knows of no limit");
}

/// An edge with a window of its own that opens for a second in each week.
fn barely_open() -> Hello {
    Hello { windows: vec![parse_window("Sun 03:00+1s UTC").unwrap()], ..Hello::default() }
}

#[test]
fn no_edge_lengthens_the_time_it_has() {
    let (mut world, nodes) = fleet(1);
    world.give(job_with(&nodes, json!({}), 1, None));
    assert_eq!(world.taken(), ["n0"]);
    for leader_changes in [false, true] {
        if leader_changes {
            let stored = world.stored.clone();
            world.boot(&[]);
            world.hear(FleetEvent::Node(edge("n0")));
            world.give(job_with(&nodes, json!({}), 1, stored.as_ref()));
        }
        world.up_with("n0", &[(UID, 1, OpenPhase::Running)], barely_open());
        assert_eq!((world.phase_of("n0"), &world.record("n0").clock), (NodePhase::InProgress, &None));
    }
    world.pass_until("13:52:00");
    assert_eq!(world.phase_of("n0"), NodePhase::Unknown);
    // The next task's time is counted by the edge's present clock.
    world.give(job_with(&nodes, json!({"retry": 1}), 2, None));
    world.pass_until("13:59:00");
    assert!(world.record("n0").reason.contains("waits for its window"), "{}", world.record("n0").reason);
}

#[test]
fn a_node_starts_by_the_windows_that_it_reports_last() {
    let (mut world, nodes) = fleet(1);
    let configured = |windows: &[&str]| EdgeMessage::Configured {
        settings: NodeSettings::default(),
        windows: windows.iter().map(|text| parse_window(text).unwrap()).collect(),
    };
    world.says("n0", configured(&["14:30+1h UTC"]));
    world.give(job_with(&nodes, json!({}), 1, None));
    let waits = "waits for its window, opens at 14:30 UTC (Mon 12 Jan)";
    assert_eq!((world.taken(), world.record("n0").reason.as_str()), (vec![], waits));
    world.says("n0", configured(&["14:00+1h UTC"]));
    world.pass_until("13:59:59");
    assert_eq!(world.taken(), Vec::<String>::new());
    world.pass_until("14:00:01");
    assert_eq!(world.taken(), ["n0"]);
    let (mut world, nodes) = fleet(1);
    world.says("n0", configured(&["14:30+1h UTC"]));
    world.give(job_with(&nodes, json!({}), 1, None));
    assert_eq!(world.taken(), Vec::<String>::new());
    world.says("n0", configured(&[]));
    world.pass_until("13:47:00");
    assert_eq!(world.taken(), ["n0"]);
}

#[test]
fn own_windows_add_a_week_at_most() {
    let (mut world, nodes) = fleet(1);
    world.up_with("n0", &[], barely_open());
    world.give(job_with(&nodes, json!({}), 1, None));
    let mut phase_at = |time: &str| {
        let end: Timestamp = time.parse().unwrap();
        while let Some(next) = world.controller.next_wakeup().filter(|next| *next <= end) {
            world.now = world.now.max(next);
            world.settle();
        }
        world.now = end;
        world.settle();
        world.phase_of("n0")
    };
    assert_eq!(phase_at("1970-01-18T03:00:01Z"), NodePhase::InProgress);
    // Its 300 seconds would take 300 weeks.
    assert_eq!(phase_at("1970-01-25T03:05:01Z"), NodePhase::InProgress);
    assert_eq!(phase_at("1970-01-25T03:05:04Z"), NodePhase::Unknown);
}

#[test]
fn another_site_rate_is_told_at_once() {
    let (mut world, nodes) = fleet(2);
    let rates = |world: &mut World| {
        let rates = world.controller.take_new_rates();
        rates.into_iter().map(|(_, rate)| rate.map(std::num::NonZeroU64::get)).collect::<Vec<_>>()
    };
    world.give(job_with(&nodes, json!({}), 1, None));
    assert_eq!((world.taken().len(), rates(&mut world)), (2, vec![]));
    let limited = json!({"download": {"shareWithinSite": true, "maxSiteRate": "100k"}});
    world.give(job_with(&nodes, limited, 2, None));
    assert_eq!((world.taken().len(), rates(&mut world)), (2, vec![Some(100_000)]));
    assert!(world.terms[2].share && world.terms[2].site_rate.is_some());
    world.give(job_with(&nodes, json!({"download": {"shareWithinSite": true}}), 3, None));
    assert_eq!((rates(&mut world), world.terms.last().unwrap().site_rate), (vec![None], None));
}

#[test]
fn a_pause_stops_downloads_and_costs_no_time() {
    let (mut world, nodes) = fleet(2);
    let give = |world: &mut World, pause: bool, generation, stored: Option<&ImagePrePullJobStatus>| {
        let template = json!({"nodeNames": nodes, "concurrency": 1, "timeoutSeconds": 300});
        let beside = json!({"pause": pause, "activeDeadlineSeconds": 1_000});
        world.give(with_spec(template, beside, generation, stored));
    };
    give(&mut world, false, 1, None);
    world.pass(200_000);
    assert_eq!(world.taken(), ["n0"]);
    give(&mut world, true, 2, None);
    assert_eq!((world.taken(), world.events.last()), (vec!["n0".to_owned()], Some(&"Suspended")));
    let terms = world.terms.last().unwrap();
    assert!(terms.paused && terms.windows == [Window::never()], "{terms:?}");
    world.pass(10_000_000);
    assert_eq!((world.phase_of("n0"), world.phase_of("n1")), (NodePhase::InProgress, NodePhase::Pending));
    assert_eq!((world.condition("Paused"), world.condition("Suspended").0), (("True", "Paused"), "True"));
    let reason =
        "paused since 1970-01-12 13:50:00 UTC: 1 node at work keep what they have downloaded, 1 waiting";
    assert_eq!(world.status().reason, reason);

    // The next leader knows since when, and the one after it when that ended.
    for (pause, generation) in [(true, 2), (false, 3), (false, 3)] {
        let stored = world.status().clone();
        world.restart(&nodes);
        give(&mut world, pause, generation, Some(&stored));
        world.up("n0", &[(UID, 1, OpenPhase::NeedsKeys)]);
        world.pass(100_000);
        assert_eq!(world.phase_of("n0"), NodePhase::InProgress);
        if pause {
            assert_eq!(world.status().reason, reason);
        }
    }
    assert_eq!((world.condition("Paused").0, world.terms.last().unwrap().paused), ("False", false));
    assert_eq!(world.remaining.last(), Some(&Duration::from_secs(200)), "of 300 since it was resumed");
    world.pass(99_000);
    assert_eq!(world.phase_of("n0"), NodePhase::InProgress);
    // An edge with a session has a moment more to report its end.
    world.pass(120_000);
    assert_eq!(world.phase_of("n0"), NodePhase::Unknown);
}

#[test]
fn a_job_that_never_paused_has_no_such_condition() {
    let (mut world, nodes) = fleet(1);
    world.give(job_with(&nodes, json!({}), 1, None));
    world.pass(1_000);
    assert!(world.status().conditions.iter().all(|condition| condition.type_ != "Paused"));
}
