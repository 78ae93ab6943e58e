//! Reports of sites, and what a look may cost.

use super::*;

#[test]
fn a_report_counts_nodes_blobs_and_waits() {
    let mut story = Story::of(&["a", "b"]);
    let counts = |story: &Story| {
        let report = story.sites.reports(story.now).remove(0);
        (report.nodes, report.blobs, report.waiting, report.carriers.len())
    };
    story.want("a", "1");
    story.want("b", "1");
    assert_eq!(counts(&story), (2, 1, 2, 0));
    story.hear();
    assert_eq!(counts(&story), (2, 1, 1, 1));
    story.have("a", "1");
    story.hear();
    assert_eq!(counts(&story), (2, 1, 0, 0));
    story.have("b", "1");
    assert_eq!(counts(&story), (2, 0, 0, 0));
    story.want("b", "1");
    story.say("b", &[("1", 10 * MIB, BlobState::Dropped, 0)]);
    assert_eq!(counts(&story), (1, 0, 0, 0), "b has and wants nothing");
}

#[test]
fn the_most_active_site_is_first() {
    let mut story = Story::of(&["a", "b", "c"]);
    story.place("b", "ship");
    story.place("c", "ship");
    for (node, of) in [("a", "1"), ("b", "1"), ("c", "2")] {
        story.want(node, of);
    }
    story.hear();
    story.hear_in(20);
    story.carry("b", "1", MIB);
    story.carry("c", "2", 2 * MIB);
    let reports = story.sites.reports(story.now);
    assert_eq!(reports.iter().map(|report| &*report.site).collect::<Vec<_>>(), ["ship", "factory"]);
    assert_eq!(story.sites.report_of("ship", story.now).as_ref(), reports.first());
    let carriers = reports[0].carriers.iter().map(|carrier| carrier.node.as_str());
    assert_eq!(carriers.collect::<Vec<_>>(), ["c", "b"], "the fastest one first");
}

#[test]
fn a_carriers_speed_is_that_of_its_reports() {
    let mut story = Story::of(&["a"]);
    story.hear_in(20);
    story.want("a", "1");
    story.hear();
    let mut speed = |seconds, done| {
        story.hear_in(seconds);
        story.carry("a", "1", done * MIB);
        story.sites.reports(story.now)[0].carriers[0].bytes_per_second
    };
    assert_eq!([speed(10, 1), speed(10, 2), speed(20, 6)], [0, MIB / 10, MIB / 5]);
}

#[test]
fn a_long_answer_goes_on_after_a_moment() {
    let mut story = Story::of(&["a", "b"]);
    for of in 0..700 {
        story.want("a", &of.to_string());
        story.want("b", &(1000 + of).to_string());
    }
    let (start, mut told) = (story.now, Vec::new());
    while let Some(at) = story.sites.next_wakeup().filter(|_| told.iter().sum::<usize>() < 1400) {
        story.now = at;
        told.push(story.sites.flush(at).iter().map(|to| to.blobs.len()).sum());
    }
    told.retain(|count| *count > 0);
    assert_eq!(told, [1024, 376]);
    assert_eq!(story.now.duration_since(start).as_millis(), 1020);
}

#[test]
fn nodes_that_come_and_go_cost_nothing() {
    let mut story = Story::of(&["a"]);
    let bytes = story.sites.bytes();
    assert!(bytes > 0, "a node has a cost");
    for node in 0..100 {
        let node = format!("n{node}");
        story.gather(&[&node]);
        story.sites.disconnect(&node.as_str().into(), story.now);
        story.sites.set_labels(&node.as_str().into(), None, story.now);
    }
    assert_eq!(story.sites.bytes(), 2 * bytes, "the place of the second one is used again");
}

#[test]
fn memory_grows_by_nodes_seekers_and_holders() {
    let mut story = Story::of(&["a", "b", "c", "d"]);
    let mut bytes = story.sites.bytes();
    assert!(bytes >= 4 * size_of::<nodes::SiteNode>());
    let seeker = size_of::<book::Seeker>();
    let book = seeker + size_of::<book::BlobBook>();
    let holder = size_of::<book::Holder>();
    for (node, state, least) in [
        ("a", BlobState::Wanted, book),
        ("b", BlobState::Wanted, seeker),
        ("c", BlobState::Here, holder),
        ("d", BlobState::Here, holder),
    ] {
        story.say(node, &[("1", MIB, state, 0)]);
        let more = story.sites.bytes().saturating_sub(bytes);
        assert!((least..least + 1000).contains(&more), "{more} bytes of {node}");
        bytes += more;
    }
}

#[test]
fn a_blob_has_256_holders() {
    let mut story = Story::of(&[]);
    for node in 0..258 {
        let node = format!("n{node}");
        story.gather(&[&node]);
        story.have(&node, "1");
    }
    assert_eq!(story.sites.by_name["factory"].books[&0].holders.len(), 256);
}

#[test]
fn a_site_remembers_the_limits_of_64_jobs() {
    for (others, left) in [(63, 64), (64, 1)] {
        let mut story = Story::of(&["a"]);
        story.max_rate = NonZeroU64::new(900);
        story.want("a", "1");
        assert_eq!(story.hear(), ["a 1: carry at 900"]);
        let site = story.sites.by_name.get_mut("factory").unwrap();
        for job in 0..others {
            site.set_rate(&JobUid(job.to_string()), story.max_rate);
        }
        story.want("a", "2");
        assert_eq!(story.hear().len(), 2);
        assert_eq!(story.sites.by_name["factory"].rates.len(), left);
    }
}

#[test]
fn a_message_after_a_look_waits_for_its_pace() {
    let mut story = Story::of(&["a"]);
    for of in ["1", "2"] {
        story.want("a", of);
        let after = story.now + Duration::from_millis(100);
        assert_eq!(story.sites.next_wakeup(), Some(after));
        story.hear();
    }
}

#[test]
fn a_look_handles_4096_timers() {
    let mut story = Story::of(&["a", "b", "c", "d", "e"]);
    for (start, node) in (0..).step_by(1000).zip(["a", "b", "c", "d", "e"]) {
        let blobs: Vec<String> = (start..start + 1000).map(|of: u32| of.to_string()).collect();
        for blobs in blobs.chunks(MAX_BLOBS) {
            let all: Vec<_> = blobs.iter().map(|of| (of.as_str(), MIB, BlobState::Wanted, 0)).collect();
            story.say(node, &all);
        }
    }
    story.now += Duration::from_secs(1);
    story.sites.flush(story.now);
    let due = (story.now.as_millisecond(), NodeId::MAX, NodeId::MAX);
    assert_eq!(story.sites.by_name["factory"].timers.range(..=due).count(), 5000 - 4096);
}

#[test]
fn one_look_places_carriers_and_readers() {
    let mut story = Story::of_streaming(&["a", "b"]);
    for of in 0..20 {
        story.want("a", &of.to_string());
        story.want("b", &of.to_string());
    }
    story.sites.flush(story.now + Duration::from_secs(1));
    let books = story.sites.by_name["factory"].books.values();
    assert_eq!(books.map(|book| book.readers.len()).sum::<usize>(), 6);
}
