//! Figures as a table for people.

#![allow(clippy::print_stdout)]

use std::collections::BTreeMap;

use super::figures::{Connect, FleetFigures, Idle, JobFigures, Kill};
use super::kruise::KruiseFigures;
use super::listing::EdgeListing;
use super::old_jobs::OldJobFigures;
use super::people::{Cost, PeopleFigures, Scrapes};

/// Width of the names of figures.
const NAME: usize = 44;

/// Prints the figures to standard output.
pub(crate) fn print(figures: &FleetFigures) {
    let FleetFigures { options, cluster, machine, connect, idle, job, people } = figures;
    println!("\n{} nodes, {} images, pulls take {}", options.nodes, options.images, options.pull);
    println!("{cluster} and all parts on this machine: {machine}\n");
    print_connect(connect);
    if let Some(idle) = idle {
        print_idle(idle);
    }
    print_job(job);
    if let Some(kill) = &job.kill {
        print_kill(kill);
    }
    if let Some(people) = people {
        print_people(people);
    }
}

/// Prints the figures of `--kruise` to standard output.
pub(super) fn print_kruise(figures: &KruiseFigures) {
    let (options, job) = (&figures.options, &figures);
    println!("\n{} nodes, {} images, pulls take {}", options.nodes, options.images, options.pull);
    println!("{} and all parts on this machine: {}\n", figures.cluster, figures.machine);
    print_connect(&figures.connect);
    print_heading("Before the job");
    let made = job.writes_before.iter().filter(|(what, _)| what.starts_with("nodeimages"));
    print_writes(made);
    print_heading("The job, from its creation to its end");
    print_line("it has ended", format!("{:.2} s", job.ended_seconds));
    let (desired, succeeded) = job.desired_and_succeeded;
    print_line("desired, succeeded", format!("{desired}, {succeeded}"));
    print_line("pulls; of images that were whole", format!("{}; {}", job.pulls, job.pulled_twice));
    print_writes(&job.writes_to_end);
    print_heading("Its time to live is over, until each NodeImage is empty");
    print_line("after", format!("{:.2} s", job.removed_seconds));
    print_writes(&job.writes_to_removal);
    print_heading("Together");
    let (per, events) = (job.per_node_and_image, job.events_per_node_and_image);
    print_line(
        "writes for each node and image",
        format!("{per:.2} (Kruise: about 5), and {events:.2} events"),
    );
    print_line("cloudcore, CPU", format!("{:.1} s", job.cloud_cpu_seconds));
    print_line("cloudcore, memory at most", mib(job.cloud_peak));
}

/// Prints the figures of `--old-jobs` to standard output.
pub(crate) fn print_old_jobs(figures: &OldJobFigures) {
    let OldJobFigures { options, machine, connect, job_bytes, reports, etcd_database, .. } = figures;
    println!("\n{} nodes, {} old jobs", options.nodes, options.old_jobs.unwrap_or(0));
    println!("all parts on this machine: {machine}\n");
    print_connect(connect);
    print_heading("A leader starts");
    print_line(
        "an old job; reports; etcd",
        format!("{}; {reports}; {}", kib(*job_bytes), mib(*etcd_database)),
    );
    print_line("a client lists all jobs in", format!("{:.1} s", figures.list_seconds));
    print_line("it serves edges after", format!("{:.1} s", figures.ready_seconds));
    print_line("so after reading", format!("{:.1} s", figures.after_reading()));
    print_line("cloudcore, CPU until then", format!("{:.1} s", figures.ready_cpu_seconds));
    print_line("cloudcore, memory then", mib(figures.ready_rss));
    print_line("all edges are back after", format!("{:.1} s", figures.back_seconds));
    print_line("cloudcore, memory at most", mib(figures.cloud_peak));
}

fn print_writes<'a>(writes: impl IntoIterator<Item = (&'a String, &'a u64)>) {
    let writes: BTreeMap<_, _> = writes.into_iter().collect();
    print_line("writes to the API server", writes.values().copied().sum::<u64>().to_string());
    for (what, count) in writes {
        print_line(&format!("  {what}"), count.to_string());
    }
}

fn print_connect(connect: &Connect) {
    let Connect { nodes, seconds, cpu_seconds, rss_before, rss_after, per_session } = *connect;
    print_heading("The fleet connects, all at once");
    print_line("all sessions up", format!("{seconds:.1} s"));
    print_line(
        "cloudcore, CPU for it",
        format!("{cpu_seconds:.1} s, {} a session", millis(cpu_seconds, nodes)),
    );
    print_line("cloudcore, memory before and after", format!("{} and {}", mib(rss_before), mib(rss_after)));
    print_line("cloudcore, memory of a session", kib(per_session));
}

fn print_idle(idle: &Idle) {
    let Idle { seconds, cpu_seconds: _, cpu_millis_per_thousand, rss, sessions_begun, listing } = *idle;
    print_heading(&format!("Idle for {seconds:.0} s"));
    print_line("cloudcore, CPU of 1,000 sessions", format!("{cpu_millis_per_thousand:.1} ms a second"));
    print_line("cloudcore, memory", mib(rss));
    print_line("sessions begun", sessions_begun.to_string());
    let EdgeListing { edges, connected, pages, bytes, seconds, slowest_page_seconds } = listing;
    print_line("list of the edges", format!("{edges}, {connected} of them connected; {} KiB", bytes / 1024));
    print_line(
        "time for it",
        format!("{pages} pages in {seconds:.2} s, the slowest in {:.1} ms", slowest_page_seconds * 1000.0),
    );
}

fn print_job(job: &JobFigures) {
    let summary = &job.summary;
    print_heading("The job, from its creation");
    let time = |seconds: Option<f64>| seconds.map_or("none".to_owned(), |seconds| format!("{seconds:.2} s"));
    print_line("first task on an edge", time(job.first_task_seconds));
    print_line("last task on an edge", time(job.last_task_seconds));
    print_line(&format!("{:?}", job.phase), time(Some(job.ended_seconds)));
    print_line("every result acknowledged", time(Some(job.acknowledged_seconds)));
    let (successful, failure, unknown) = (summary.successful, summary.failure, summary.unknown);
    print_line(
        "nodes successful, failed, unknown",
        format!("{successful}, {failure}, {unknown} of {}", summary.desired),
    );
    print_line("pulls; of images that were whole", format!("{}; {}", job.pulls, job.pulled_twice));
    print_line("nodes at work at the same time, at most", job.most_at_once.to_string());
    print_line("messages down, up", format!("{}, {}", job.messages_down, job.messages_up));
    if job.sessions > 0 {
        print_line("sessions that came up in between", job.sessions.to_string());
    }
    print_line("writes to the API server", job.writes_sum.to_string());
    for (what, count) in &job.writes {
        print_line(&format!("  {what}"), count.to_string());
    }
    print_line("the job object", kib(job.job_bytes));
    let reports = job.reports;
    print_line(
        "its reports",
        format!("{}, the largest {}, all {}", reports.count, kib(reports.largest), kib(reports.sum)),
    );
    print_line("cloudcore, CPU", format!("{:.1} s", job.cloud_cpu_seconds));
    print_line("cloudcore, memory at most", mib(job.cloud_peak));
    if job.apiserver_rss > 0 {
        print_line("kube-apiserver, memory", mib(job.apiserver_rss));
        print_line(
            "etcd, memory; its database",
            format!("{}; {}", mib(job.etcd_rss), mib(job.etcd_database)),
        );
    }
    print_line("the fleet itself, memory", mib(job.fleet_rss));
}

fn print_people(people: &PeopleFigures) {
    let PeopleFigures { commands, page, scrapes } = people;
    let cost = |Cost { what, seconds, bytes, peak }: &Cost| {
        print_line(what, format!("{seconds:.2} s, {} KiB, at most {}", bytes / 1024, mib(*peak)));
    };
    print_heading("kubectl prepull: time, output, memory");
    commands.iter().for_each(cost);
    print_heading("Its page: time, answer, memory of its server");
    page.iter().for_each(cost);
    let Scrapes { samples: [before, most, after], bytes, slowest_seconds, rules, queries, rss } = scrapes;
    print_heading("A Prometheus that scrapes cloudcore once a second");
    print_line("samples before the job, at most, after it", format!("{before}, {most}, {after}"));
    print_line("the last scrape", format!("{} KiB", bytes / 1024));
    print_line("the slowest scrape", format!("{:.1} ms", slowest_seconds * 1000.0));
    print_line("alerts evaluated, queries answered", format!("{rules}, {queries}"));
    print_line("its memory", mib(*rss));
}

fn print_kill(kill: &Kill) {
    print_heading("cloudcore killed and started again, from the kill");
    let at = format!("{:.1} s after the job's creation", kill.at_seconds);
    print_line("the kill", format!("{at}: {} pulled, {} at work", kill.pulled, kill.running));
    for (what, seconds) in [
        ("it listens again", kill.listens_seconds),
        ("half of the edges are back", kill.half_back_seconds),
        ("99 of 100 are back", kill.most_back_seconds),
        ("all are back", kill.back_seconds),
        ("the job has ended", kill.ended_seconds),
    ] {
        print_line(what, format!("{seconds:.1} s"));
    }
    print_line("connections turned away, edges sent away", kill.turned_away.to_string());
    print_line("cloudcore, CPU until all were back", format!("{:.1} s", kill.cpu_seconds));
}

fn print_heading(text: &str) {
    println!("{text}");
}

fn print_line(name: &str, value: impl std::fmt::Display) {
    println!("  {name:<NAME$} {value}");
}

/// Formats the milliseconds for each of `count`.
fn millis(seconds: f64, count: usize) -> String {
    format!("{:.2} ms", seconds * 1000.0 / f64::from(u32::try_from(count).unwrap_or(u32::MAX)).max(1.0))
}

/// Formats bytes as KiB. Counts in tenths, so that no float is needed.
pub(super) fn kib(bytes: u64) -> String {
    let tenths = bytes * 10 / 1024;
    format!("{}.{} KiB", tenths / 10, tenths % 10)
}

/// Formats bytes as MiB.
pub(super) fn mib(bytes: u64) -> String {
    let tenths = bytes * 10 / (1024 * 1024);
    format!("{}.{} MiB", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_one_decimal() {
        assert_eq!((kib(1536), mib(1536 * 1024)), ("1.5 KiB".to_owned(), "1.5 MiB".to_owned()));
        assert_eq!(millis(10.0, 10_000), "1.00 ms");
    }
}
