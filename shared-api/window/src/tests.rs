#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::time::Duration;

use jiff::civil::DateTime;
use jiff::{SignedDuration, Timestamp};
use prepull_api::download::{Weekday, Window};
use proptest::prelude::*;

use super::*;

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn openings(windows: &[&str]) -> Openings {
    delayed(windows, Duration::ZERO)
}

fn delayed(windows: &[&str], delay: Duration) -> Openings {
    let windows: Vec<_> = windows.iter().map(|text| parse_window(text).unwrap()).collect();
    Openings::new(&windows, delay, Some("Europe/Berlin"))
}

/// The next times in which it is open, from this moment on.
fn spans(openings: &Openings, from: &str, count: usize) -> Vec<(String, String)> {
    let mut now = at(from);
    (0..count)
        .map(|_| {
            let opens = openings.next_open(now).unwrap();
            let closes = openings.state_at(opens).until.unwrap();
            now = closes;
            (opens.to_string(), closes.to_string())
        })
        .collect()
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(opens, closes)| ((*opens).to_owned(), (*closes).to_owned())).collect()
}

#[test]
fn a_skipped_start_runs_at_the_next_moment() {
    // Berlin goes from 02:00 to 03:00 on 29 March 2026, at 01:00 UTC.
    assert_eq!(
        spans(&openings(&["02:30+1h Europe/Berlin"]), "2026-03-28T00:00:00Z", 3),
        pairs(&[
            ("2026-03-28T01:30:00Z", "2026-03-28T02:30:00Z"),
            ("2026-03-29T01:00:00Z", "2026-03-29T02:00:00Z"),
            ("2026-03-30T00:30:00Z", "2026-03-30T01:30:00Z"),
        ])
    );
    // New York from 02:00 to 03:00 on 8 March 2026, at 07:00 UTC.
    assert_eq!(
        spans(&openings(&["02:00+30m America/New_York"]), "2026-03-08T00:00:00Z", 2),
        pairs(&[
            ("2026-03-08T07:00:00Z", "2026-03-08T07:30:00Z"),
            ("2026-03-09T06:00:00Z", "2026-03-09T06:30:00Z"),
        ])
    );
    // Lord Howe goes on by half an hour: 02:00 to 02:30 on 4 October 2026, at 15:30 UTC of the day before.
    assert_eq!(
        spans(&openings(&["02:15+1h Australia/Lord_Howe"]), "2026-10-03T00:00:00Z", 2),
        pairs(&[
            ("2026-10-03T15:30:00Z", "2026-10-03T16:30:00Z"),
            ("2026-10-04T15:15:00Z", "2026-10-04T16:15:00Z"),
        ])
    );
    // Samoa skipped the whole of Friday, 30 December 2011, at 10:00 UTC.
    assert_eq!(
        spans(&openings(&["Fri 12:00+2h Pacific/Apia"]), "2011-12-29T00:00:00Z", 2),
        pairs(&[
            ("2011-12-30T10:00:00Z", "2011-12-30T12:00:00Z"),
            ("2012-01-05T22:00:00Z", "2012-01-06T00:00:00Z"),
        ])
    );
}

#[test]
fn a_repeated_start_runs_once() {
    // Berlin goes from 03:00 back to 02:00 on 25 October 2026, at 01:00 UTC.
    assert_eq!(
        spans(&openings(&["02:30+4h Europe/Berlin"]), "2026-10-24T12:00:00Z", 2),
        pairs(&[
            ("2026-10-25T00:30:00Z", "2026-10-25T04:30:00Z"),
            ("2026-10-26T01:30:00Z", "2026-10-26T05:30:00Z"),
        ])
    );
    // Lord Howe from 02:00 back to 01:30 on 5 April 2026, at 15:00 UTC of the day before.
    assert_eq!(
        spans(&openings(&["01:45+10m Australia/Lord_Howe"]), "2026-04-04T12:00:00Z", 2),
        pairs(&[
            ("2026-04-04T14:45:00Z", "2026-04-04T14:55:00Z"),
            ("2026-04-05T15:15:00Z", "2026-04-05T15:25:00Z"),
        ])
    );
    // New York from 02:00 back to 01:00 on 1 November 2026, at 06:00 UTC: the window goes over the change.
    assert_eq!(
        spans(&openings(&["Sat 23:00+4h America/New_York"]), "2026-10-31T12:00:00Z", 1),
        pairs(&[("2026-11-01T03:00:00Z", "2026-11-01T07:00:00Z")])
    );
}

#[test]
fn adjoining_windows_are_delayed_once() {
    let windows = ["01:00+2h UTC", "02:30+1h UTC", "03:30+30m UTC", "12:00+1h UTC"];
    let expected = |minutes: &str| {
        pairs(&[
            (&format!("2026-01-01T01:{minutes}:00Z"), "2026-01-01T04:00:00Z"),
            (&format!("2026-01-01T12:{minutes}:00Z"), "2026-01-01T13:00:00Z"),
        ])
    };
    assert_eq!(spans(&openings(&windows), "2026-01-01T00:00:00Z", 2), expected("00"));
    assert_eq!(spans(&delayed(&windows, 20 * MINUTE), "2026-01-01T00:00:00Z", 2), expected("20"));
    // Open without an end: there is no opening to put off.
    let always = delayed(&["00:00+24h UTC"], 20 * MINUTE);
    assert!(always.is_open(at("2026-01-01T00:05:00Z")));
    let week = delayed(&["Mon 00:00+168h UTC"], 20 * MINUTE);
    assert!(week.is_open(at("2026-01-05T00:05:00Z")) && week.is_open(at("2026-01-04T23:59:59Z")));
}

#[test]
fn node_windows_use_its_zone_or_utc() {
    let window = [parse_window("01:00+1h Node").unwrap()];
    let opens = |zone| {
        let next = Openings::new(&window, Duration::ZERO, zone).next_open(at("2026-01-01T00:30:00Z"));
        next.unwrap().to_string()
    };
    assert_eq!(opens(Some("Asia/Kolkata")), "2026-01-01T19:30:00Z");
    assert_eq!(opens(None), "2026-01-01T01:00:00Z");
    assert_eq!(opens(Some("No/Where")), "2026-01-01T01:00:00Z");
}

#[test]
fn a_window_in_an_unknown_zone_never_opens() {
    let mut window = parse_window("01:00+1h").unwrap();
    window.time_zone = "Mars/Olympus".to_owned().into();
    let openings = Openings::new(&[window], Duration::ZERO, None);
    let now = at("2026-01-01T01:10:00Z");
    assert_eq!((openings.is_open(now), openings.next_open(now)), (false, None));
    assert!(openings.explain_wait(now).unwrap().contains("\"Mars/Olympus\" is not known"));
}

#[test]
fn two_sides_are_open_where_both_are() {
    let both = openings(&["01:00+4h UTC"]).intersect_with(openings(&["03:00+4h UTC"]));
    assert_eq!(
        spans(&both, "2026-01-01T00:00:00Z", 2),
        pairs(&[
            ("2026-01-01T03:00:00Z", "2026-01-01T05:00:00Z"),
            ("2026-01-02T03:00:00Z", "2026-01-02T05:00:00Z"),
        ])
    );
    let day = at("2026-01-01T00:00:00Z");
    assert_eq!(both.open_between(day, at("2026-01-03T04:00:00Z")), 5 * HOUR);
    assert_eq!(both.after_open_time(day, 3 * HOUR), at("2026-01-02T04:00:00Z"));
    let never = openings(&["01:00+1h UTC"]).intersect_with(openings(&["03:00+1h UTC"]));
    assert_eq!(never.next_open(day), None);
    assert_eq!(never.after_open_time(day, HOUR), day.checked_add(HORIZON).unwrap());
    assert_eq!(never.explain_wait(day).unwrap(), "waits for its window, which does not open within 5 weeks");
}

#[test]
fn without_windows_it_is_always_open() {
    let always = Openings::new(&[], HOUR, None);
    let now = at("2026-01-01T00:00:00Z");
    assert!(always.is_always() && always.is_open(now) && always.explain_wait(now).is_none());
    assert_eq!(always.after_open_time(now, HOUR), at("2026-01-01T01:00:00Z"));
    assert_eq!(always.open_between(now, at("2026-01-01T01:00:00Z")), HOUR);
    assert_eq!(always.open_between(at("2026-01-01T01:00:00Z"), now), Duration::ZERO);
}

#[test]
fn time_far_ahead_needs_no_walk() {
    let nightly = openings(&["01:00+1h UTC"]);
    let now = at("2026-01-01T00:00:00Z");
    let century = nightly.after_open_time(now, HOUR * 365 * 100);
    let years = century.duration_since(now).as_hours() / 24 / 365;
    assert!((99..=101).contains(&years), "{years}");
    assert_eq!(nightly.open_between(now, at("2126-01-01T00:00:00Z")).as_secs() / 3600 / 364, 100);
    // Longer than time lasts.
    assert_eq!(nightly.after_open_time(now, Duration::MAX), Timestamp::MAX);
}

/// The moment by which it was open for this long, from one opening to the next.
fn step_by_step(openings: &Openings, from: Timestamp, open: Duration) -> Timestamp {
    let (mut now, mut left) = (from, open);
    loop {
        let Some(opens) = openings.next_open(now) else { return now.checked_add(HORIZON).unwrap() };
        let closes = openings.state_at(opens).until.unwrap();
        let length = Duration::try_from(closes.duration_since(opens)).unwrap();
        if left <= length {
            return opens.checked_add(left).unwrap();
        }
        (now, left) = (closes, left.saturating_sub(length));
    }
}

fn after_hours(time: Timestamp, hours: i64) -> Timestamp {
    time.checked_add(SignedDuration::from_hours(hours)).unwrap()
}

/// The result of a walk, and the openings that it looked up.
fn counted<T>(walk: impl FnOnce() -> T) -> (T, usize) {
    schedule::LOOKUPS.set(0);
    (walk(), schedule::LOOKUPS.get())
}

/// 16 windows of a second each, in every day.
fn seconds(minute: u8, zone: &str) -> Openings {
    let windows: Vec<_> = (0..16).map(|hour| format!("{hour:02}:{minute:02}+1s {zone}")).collect();
    openings(&windows.iter().map(String::as_str).collect::<Vec<_>>())
}

#[test]
fn many_short_windows_need_no_long_walk() {
    let start: DateTime = "2026-01-01T00:20:30".parse().unwrap();
    // Where the clocks change, one opening more or less may count.
    for (zone, tolerated) in [("UTC", 0), ("Europe/Berlin", 9)] {
        let (openings, time_zone) = (seconds(10, zone), zones::find_zone(zone).unwrap());
        let from = start.to_zoned(time_zone.clone()).unwrap().timestamp();
        for open in [1, 500, 3_600, 200_000] {
            let (end, lookups) = counted(|| openings.after_open_time(from, Duration::from_secs(open)));
            assert!(lookups < 4_000, "{lookups} for {open:?}");
            // The first day has 15 left.
            let (day, hour) = (i64::try_from(open / 16).unwrap(), i8::try_from(open % 16).unwrap());
            let date = start.date().checked_add(SignedDuration::from_hours(24 * day)).unwrap();
            let expected = date.at(hour, 10, 1, 0).to_zoned(time_zone.clone()).unwrap().timestamp();
            let difference = end.duration_since(expected).abs();
            assert!(difference.as_hours() <= tolerated, "{difference:?} for {open} seconds in {zone}");
        }
    }
    let now = at("2026-01-01T00:20:30Z");
    let both = seconds(10, "UTC").intersect_with(seconds(10, "Europe/Berlin"));
    let (_, lookups) = counted(|| both.after_open_time(now, HOUR));
    assert!(lookups < 5_000, "{lookups}");
    let never = seconds(10, "UTC").intersect_with(seconds(11, "UTC"));
    let (next, lookups) = counted(|| never.next_open(now));
    assert!(next.is_none() && lookups < 2_500, "{lookups}");
    let in_a_week = after_hours(now, 8 * 24);
    let (end, lookups) = counted(|| seconds(10, "UTC").after_open_time_until(now, HOUR, in_a_week));
    assert!(end == in_a_week && lookups < 500, "{end}, {lookups}");
}

#[test]
fn windows_open_at_the_beginning_of_time() {
    let openings = openings(&["01:00+1h UTC"]);
    let in_days = |days: u64| openings.open_between(Timestamp::MIN, after_days(days));
    assert_eq!(in_days(10), in_days(3) + openings.open_between(after_days(3), after_days(10)));
    assert!(in_days(10) >= Duration::from_secs(9 * 3600), "{:?}", in_days(10));
}

fn after_days(days: u64) -> Timestamp {
    Timestamp::MIN.checked_add(Duration::from_secs(days * 24 * 3600)).unwrap()
}

#[test]
fn the_next_opening_is_explained_in_its_zone() {
    let nightly = delayed(&["Mon 01:00+4h Europe/Berlin", "20:00+10m UTC"], 7 * MINUTE);
    let explain = |now: &str| nightly.explain_wait(at(now));
    assert_eq!(
        explain("2026-11-22T21:00:00Z").unwrap(),
        "waits for its window, opens at 01:07 Europe/Berlin (Mon 23 Nov)"
    );
    assert_eq!(
        explain("2026-11-22T12:00:00Z").unwrap(),
        "waits for its window, opens at 20:07 UTC (Sun 22 Nov)"
    );
    assert_eq!(explain("2026-11-23T01:00:00Z"), None);
}

#[test]
fn a_window_in_one_line_is_read_and_written() {
    let window = parse_window("fri-Mon,wed 01:00+1h30m Europe/Berlin").unwrap();
    assert_eq!(window.days, [Weekday::Mon, Weekday::Wed, Weekday::Fri, Weekday::Sat, Weekday::Sun]);
    assert_eq!(write_window(&window), "Mon,Wed,Fri,Sat,Sun 01:00+1h30m Europe/Berlin");
    assert_eq!(parse_window(&write_window(&window)).unwrap(), window);
    assert_eq!(write_window(&parse_window(" 23:59+90s ").unwrap()), "23:59+1m30s Node");
    for (bad, why) in [
        ("", "is not a window"),
        ("01:00", "is not a window"),
        ("Mon Tue 01:00+1h", "is not a window"),
        ("01:00+1h UTC x", "is not a window"),
        ("Day 01:00+1h", "\"Day\" is not a day"),
        ("Mon- 01:00+1h", "\"\" is not a day"),
        ("1:00+1h", "\"1:00\" is not a time of day"),
        ("01:00+1", "\"1\" is not a duration"),
        ("01:00+", "\"\" is not a duration"),
        ("01:00+0s", "0s is not allowed"),
        ("01:00+169h", "169h is not allowed: write 1s to 168h"),
        ("01:00+1h Europe/Nowhere", "\"Europe/Nowhere\" is not a time zone"),
    ] {
        let error = parse_window(bad).unwrap_err().to_string();
        assert!(error.contains(why), "{bad}: {error}");
    }
}

#[test]
fn a_duration_is_hours_minutes_and_seconds() {
    assert_eq!(parse_duration("1h30m5s").unwrap(), Duration::from_secs(5405));
    assert_eq!(write_duration(Duration::from_secs(5405)), "1h30m5s");
    assert_eq!(write_duration(Duration::ZERO), "0s");
    for bad in ["", "5", "h", "1d", "-1h", "1.5h", "99999999999999999999h", "9999999999999999h", "1h é"] {
        parse_duration(bad).unwrap_err();
    }
}

/// How far before the first moment the oracle looks: a day for times that exist twice, and the longest window.
const BEFORE: usize = 2 * 24 * 60;

/// Whether it is open in each of these minutes, counted minute by minute and by the definition alone.
fn open_minutes(windows: &[Window], delay: usize, from: Timestamp, count: usize) -> Vec<bool> {
    let mut open = vec![false; BEFORE + count];
    for window in windows {
        let length = usize::try_from(window.duration.as_secs() / 60).unwrap();
        for (minute, opens) in opening_minutes(window, from, count).into_iter().enumerate() {
            if opens {
                open.iter_mut().skip(minute).take(length).for_each(|open| *open = true);
            }
        }
    }
    (BEFORE..BEFORE + count).map(|minute| open[minute - delay..=minute].iter().all(|open| *open)).collect()
}

/// Whether the window opens in each minute.
fn opening_minutes(window: &Window, from: Timestamp, count: usize) -> Vec<bool> {
    let zone = zones::find_zone(&window.time_zone.to_string()).unwrap();
    let civil = |minute: usize| {
        zone.to_datetime(minutes(from, i64::try_from(minute).unwrap() - i64::try_from(BEFORE).unwrap()))
    };
    let is_start = |time: DateTime| {
        let day = Weekday::ALL[usize::from(time.weekday().to_monday_zero_offset().unsigned_abs())];
        (window.days.is_empty() || window.days.contains(&day))
            && (time.hour(), time.minute())
                == (window.start.hour().cast_signed(), window.start.minute().cast_signed())
    };
    let mut shown = HashSet::new();
    let mut before: Option<DateTime> = None;
    (0..BEFORE + count)
        .map(|minute| {
            let here = civil(minute);
            let mut opens = shown.insert(here) && is_start(here);
            // What the clocks have skipped.
            let mut skipped =
                before.map_or(here, |before| before.saturating_add(SignedDuration::from_mins(1)));
            while skipped < here {
                opens |= is_start(skipped);
                skipped = skipped.saturating_add(SignedDuration::from_mins(1));
            }
            before = Some(here);
            opens
        })
        .collect()
}

fn minutes(time: Timestamp, minutes: i64) -> Timestamp {
    time.checked_add(SignedDuration::from_mins(minutes)).unwrap()
}

fn any_window() -> impl Strategy<Value = Window> {
    let zones = ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia", "UTC"];
    let days = prop_oneof![
        Just(String::new()),
        proptest::sample::subsequence(Weekday::ALL.to_vec(), 1..4).prop_map(|days| days
            .iter()
            .map(|day| day.as_str())
            .collect::<Vec<_>>()
            .join(","))
    ];
    (days, 0_u8..24, 0_u8..4, 5_u32..300, proptest::sample::select(zones.to_vec())).prop_map(
        |(days, hour, quarter, length, zone)| {
            parse_window(&format!("{days} {hour:02}:{:02}+{length}m {zone}", quarter * 15)).unwrap()
        },
    )
}

/// Moments, some of them within a day of a change of an offset.
fn any_moment() -> impl Strategy<Value = Timestamp> {
    let changes = [
        "2026-03-29T01:00:00Z",
        "2026-10-25T01:00:00Z",
        "2026-03-08T07:00:00Z",
        "2026-11-01T06:00:00Z",
        "2026-10-03T15:30:00Z",
        "2026-04-04T15:00:00Z",
        "2011-12-30T10:00:00Z",
        "2026-07-01T00:00:00Z",
    ];
    (proptest::sample::select(changes.to_vec()), -1500_i64..1500)
        .prop_map(|(change, offset)| minutes(at(change), offset))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn openings_agree_with_counting_minutes(
        windows in proptest::collection::vec(any_window(), 1..4),
        delay in 0_usize..5,
        from in any_moment(),
    ) {
        let openings = Openings::new(&windows, MINUTE * u32::try_from(delay).unwrap(), None);
        let open = open_minutes(&windows, delay, from, 240);
        for (minute, expected) in (0..).zip(&open) {
            let now = minutes(from, minute);
            prop_assert_eq!(openings.is_open(now), *expected, "at {}", now);
            // Also within the minute.
            let later = now.checked_add(SignedDuration::from_secs(59)).unwrap();
            prop_assert_eq!(openings.is_open(later), *expected, "at {}", later);
        }
        let count = u32::try_from(open.iter().filter(|open| **open).count()).unwrap();
        prop_assert_eq!(openings.open_between(from, minutes(from, 240)), MINUTE * count);
        let next = open.iter().position(|open| *open).map(|minute| minutes(from, minute.try_into().unwrap()));
        let found = openings.next_open(from).filter(|opens| *opens < minutes(from, 240));
        prop_assert_eq!(found, next);
        // The inverse of the sum.
        if count > 0 {
            let end = openings.after_open_time(from, MINUTE * count);
            prop_assert_eq!(openings.open_between(from, end), MINUTE * count);
            prop_assert!(end <= minutes(from, 240));
        }
    }

    #[test]
    fn walks_agree_with_single_steps(
        of_job in proptest::collection::vec(any_window(), 1..4),
        of_node in proptest::collection::vec(any_window(), 0..3),
        delay in 0_u32..40,
        from in any_moment(),
        hours in 1_u32..40,
        latest in 0_i64..2_000,
    ) {
        let of_node = Openings::new(&of_node, Duration::ZERO, None);
        let openings = Openings::new(&of_job, MINUTE * delay, None).intersect_with(of_node);
        let end = openings.after_open_time(from, HOUR * hours);
        let expected = step_by_step(&openings, from, HOUR * hours);
        // Those of five windows are exact for this long.
        let is_exact = expected < after_hours(from, 29 * 7 * 24);
        prop_assert!(end == expected || !is_exact, "{} is not {}", end, expected);
        let latest = after_hours(from, latest);
        prop_assert_eq!(openings.after_open_time_until(from, HOUR * hours, latest), end.min(latest));
    }

    #[test]
    fn a_state_lasts_as_long_as_it_says(
        windows in proptest::collection::vec(any_window(), 1..4),
        from in any_moment(),
        part in 0_i64..1000,
    ) {
        let openings = Openings::new(&windows, Duration::ZERO, None);
        let WindowState { is_open, until } = openings.state_at(from);
        let until = until.unwrap();
        prop_assert!(until > from);
        let length = until.duration_since(from).as_millis();
        let between = SignedDuration::from_millis(i64::try_from(length * i128::from(part) / 1000).unwrap());
        prop_assert_eq!(openings.is_open(from.checked_add(between).unwrap()), is_open);
    }

    #[test]
    fn any_text_is_a_window_or_an_error(text in "[ -~é]{0,40}") {
        if let Ok(window) = parse_window(&text) {
            prop_assert_eq!(parse_window(&write_window(&window)).unwrap(), window);
        }
    }
}
