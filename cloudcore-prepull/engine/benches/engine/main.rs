//! `cargo bench -p prepull-engine`: the engine alone, on fleets made up in memory. What a job over 1,000, 10,000 and
//! 100,000 nodes takes of one core and of memory, and how that grows.
//!
//! `NODES` in the environment takes another largest fleet than 100,000.

#![allow(clippy::print_stdout, clippy::expect_used, clippy::cast_precision_loss)]

mod sites;
mod world;

use std::process::Command;
use std::time::Duration;

use jiff::SignedDuration;
use peak_alloc::PeakAlloc;
use world::{LOTS, PullTime, World};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// The fleet that the bars are for.
const NODES: usize = 100_000;
/// The most time of a job over [`NODES`] from its creation to its end, both of one core and by the wall clock.
const BAR_TIME: Duration = Duration::from_secs(30);
/// Its most MiB, including the simulated cluster.
const BAR_MEMORY: f64 = 2560.0;
/// Twenty ImagePullJobs over [`KRUISE_NODES`], and the start of another leader after them, may take this many MiB,
/// without the simulated API server.
const BAR_KRUISE: f64 = 512.0;
/// The fleet of that bar.
const KRUISE_NODES: usize = 10_000;
/// Kibibytes in a mebibyte.
const MIB: f64 = 1024.0;

/// One way to use a fleet.
struct Scenario {
    name: &'static str,
    kruise: bool,
    jobs: usize,
    /// The largest fleet that it is measured on.
    largest: usize,
    pull_time: PullTime,
    /// Whether another leader takes over at the end.
    restarts: bool,
    about: &'static str,
}

const SCENARIOS: [Scenario; 6] = [
    Scenario {
        name: "burst",
        kruise: false,
        jobs: 1,
        largest: usize::MAX,
        pull_time: at_once,
        restarts: false,
        about: "one ImagePrePullJob, pulls of 100 ms",
    },
    Scenario {
        name: "trickle",
        kruise: false,
        jobs: 1,
        largest: usize::MAX,
        pull_time: spread,
        restarts: false,
        about: "one ImagePrePullJob, pulls that end one by one over five minutes",
    },
    Scenario {
        name: "fifty",
        kruise: false,
        jobs: 50,
        largest: usize::MAX,
        pull_time: at_once,
        restarts: false,
        about: "fifty ImagePrePullJobs at once, each over a tenth of the nodes",
    },
    Scenario {
        name: "kruise",
        kruise: true,
        jobs: 1,
        largest: usize::MAX,
        pull_time: at_once,
        restarts: false,
        about: "one ImagePullJob, pulls of 100 ms",
    },
    Scenario {
        name: "kruise-fifty",
        kruise: true,
        jobs: 50,
        largest: usize::MAX,
        pull_time: at_once,
        restarts: false,
        about: "fifty ImagePullJobs at once, each over a tenth of the nodes",
    },
    Scenario {
        name: "kruise-twenty",
        kruise: true,
        jobs: 20,
        largest: KRUISE_NODES,
        pull_time: at_once,
        restarts: true,
        about: "twenty ImagePullJobs at once, each over all nodes; then another leader",
    },
];

fn verdict(met: bool) -> &'static str {
    if met { "met" } else { "MISSED" }
}

fn at_once(_: usize) -> SignedDuration {
    SignedDuration::from_millis(100)
}

fn spread(task: usize) -> SignedDuration {
    SignedDuration::from_micros(i64::try_from(task * 7_919 % 300_000).unwrap_or_default() * 1_000)
}

/// What one scenario took at one size.
#[derive(Default)]
struct Taken {
    busy: f64,
    longest: f64,
    inputs: usize,
    tasks: usize,
    writes: usize,
    simulated: f64,
    /// Of the whole process, in MiB, the made-up cluster's own included.
    memory: f64,
    /// The same, with a second leader's start.
    restarted: f64,
    /// What the engine still holds at the end, in KiB for each node.
    kept: f64,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    if let [name, nodes] = arguments.as_slice()
        && name == ENDED
    {
        return measure_ended(nodes.parse().expect("a number of nodes"));
    }
    if arguments == [SITES] {
        return sites::measure(MEMORY);
    }
    if let [name, nodes] = arguments.as_slice() {
        let scenario = SCENARIOS.iter().find(|scenario| scenario.name == name).expect("a scenario");
        return measure(scenario, nodes.parse().expect("a number of nodes"));
    }
    let largest = std::env::var("NODES").map_or(NODES, |nodes| nodes.parse().expect("NODES is a number"));
    println!(
        "The engine alone, on one core. Time is the engine's own; memory is the whole process with its made-up cluster."
    );
    for scenario in &SCENARIOS {
        println!("\n{}: {}", scenario.name, scenario.about);
        println!(
            "{:>8} {:>9} {:>9} {:>8} {:>11} {:>9} {:>9} {:>8} {:>9} {:>11}",
            "nodes",
            "tasks",
            "writes",
            "engine",
            "per input",
            "longest",
            "lasted",
            "growth",
            "memory",
            "kept/node"
        );
        let mut before: Option<(usize, Taken)> = None;
        for nodes in
            [1_000, 10_000, largest].into_iter().filter(|nodes| *nodes <= largest.min(scenario.largest))
        {
            let taken = in_own_process(scenario, nodes);
            // 1.0: ten times the nodes take ten times the time.
            let growth = before.as_ref().map_or("–".to_owned(), |(fewer, less)| {
                let exponent = (taken.busy / less.busy).ln() / (nodes as f64 / *fewer as f64).ln();
                format!("n^{exponent:.2}")
            });
            println!(
                "{nodes:>8} {:>9} {:>9} {:>6.2} s {:>8.1} µs {:>6.0} ms {:>7.0} s {growth:>8} {:>5.0} MiB {:>7.1} KiB",
                taken.tasks,
                taken.writes,
                taken.busy,
                taken.busy * 1e6 / taken.inputs as f64,
                taken.longest * 1e3,
                taken.simulated,
                taken.memory.max(taken.restarted),
                taken.kept,
            );
            if scenario.name == "burst" && nodes == NODES {
                let bar = BAR_TIME.as_secs_f64();
                println!(
                    "         bars: {bar} s of one core {}, {bar} s from creation to end {}, {BAR_MEMORY} MiB {}",
                    verdict(taken.busy <= bar),
                    verdict(taken.simulated <= bar),
                    verdict(taken.memory <= BAR_MEMORY),
                );
            }
            if scenario.restarts && nodes == KRUISE_NODES {
                println!(
                    "         bar: {BAR_KRUISE} MiB {}",
                    verdict(taken.memory.max(taken.restarted) <= BAR_KRUISE)
                );
            }
            before = Some((nodes, taken));
        }
    }
    println!(
        "\n{ENDED}: as many ImagePrePullJobs as nodes, each over one node and pinned, all of them ended"
    );
    for nodes in [1_000, 10_000].into_iter().filter(|nodes| *nodes <= largest) {
        measure_ended(nodes);
    }
    sites::measure(MEMORY);
}

/// The name of the rows about sites.
const SITES: &str = "site";

/// The name of the row about ended jobs.
const ENDED: &str = "ended";
/// Jobs that are deleted at once.
const DELETED: usize = 1_000;
/// Batches in which nothing happens.
const IDLE: u32 = 1_000;
/// One of them may take so long. What ended jobs cost would show in milliseconds.
const BAR_IDLE: Duration = Duration::from_micros(50);

/// As many jobs as nodes, each over one node, all of them ended an instant ago. They may cost nothing, and their deletion
/// may cost one message for each edge.
fn measure_ended(nodes: usize) {
    let mut world = World::new(nodes, true, at_once, false);
    let jobs: Vec<String> = (0..nodes).map(|job| format!("job-{job}")).collect();
    for (index, job) in jobs.iter().enumerate() {
        world.make_pinned_job(job, &world::name(index));
    }
    world.run_until_ended(jobs.len());
    world.settle();
    let idle = (0..IDLE).map(|_| world.idle_batch()).sum::<Duration>() / IDLE;
    let (took, messages) = world.delete_pinned_jobs(&jobs[..DELETED.min(nodes)]);
    println!(
        "{nodes:>8} a batch {idle:>8.1?}, {DELETED} deletions {took:>6.0?} and {messages} messages; bars: {BAR_IDLE:?} {}, \
         one message an edge {}",
        verdict(idle <= BAR_IDLE),
        verdict(messages == nodes),
    );
}

/// In a process of its own, so that the most memory that it ever had is that of this scenario.
fn in_own_process(scenario: &Scenario, nodes: usize) -> Taken {
    let program = std::env::current_exe().expect("this program's path");
    let output =
        Command::new(program).args([scenario.name, &nodes.to_string()]).output().expect("start a process");
    assert!(output.status.success(), "{}: {}", scenario.name, String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("figures");
    let figures: Vec<f64> = text.split_whitespace().map(|figure| figure.parse().expect("a figure")).collect();
    let [busy, longest, inputs, tasks, writes, simulated, memory, restarted, kept] = figures[..] else {
        panic!("{text}")
    };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts, printed as such")]
    let count = |figure: f64| figure as usize;
    Taken {
        busy,
        longest,
        inputs: count(inputs),
        tasks: count(tasks),
        writes: count(writes),
        simulated,
        memory,
        restarted,
        kept,
    }
}

fn measure(scenario: &Scenario, nodes: usize) {
    let mut world = World::new(nodes, scenario.kruise, scenario.pull_time, false);
    let (before, began) = (world.figures, world.now);
    for job in 0..scenario.jobs {
        let lot = (scenario.jobs >= 50).then_some(job % LOTS);
        let name = format!("job-{job}");
        if scenario.kruise { world.make_pull_job(&name, lot) } else { world.make_job(&name, lot) }
    }
    world.run_until_ended(scenario.jobs);
    let figures = world.figures;
    let memory = most_memory_in_mib(&world);
    if scenario.restarts {
        world.restart();
    }
    world.settle();
    let restarted = most_memory_in_mib(&world);
    let used = MEMORY.current_usage();
    world.drop_engine();
    let kept = used.saturating_sub(MEMORY.current_usage()) as f64 / 1024.0;
    println!(
        "{} {} {} {} {} {} {memory} {} {}",
        figures.busy.saturating_sub(before.busy).as_secs_f64(),
        figures.longest.as_secs_f64(),
        figures.inputs - before.inputs,
        figures.tasks,
        figures.writes - before.writes,
        world.now.duration_since(began).as_secs_f64(),
        restarted,
        kept / nodes as f64,
    );
}

/// VmHWM of /proc/self/status, without the NodeImages of the simulated API server.
fn most_memory_in_mib(world: &World) -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("read /proc/self/status");
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).expect("VmHWM");
    let kib: f64 = line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number of KiB");
    kib / MIB - world.stored_bytes() as f64 / MIB / MIB
}
