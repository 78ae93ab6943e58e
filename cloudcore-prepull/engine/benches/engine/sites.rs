//! The tracker of sites: one site with a large fleet, and many sites in which nothing happens.

use std::collections::HashSet;
use std::time::Duration;

use jiff::SignedDuration;
use peak_alloc::PeakAlloc;
use prepull_api::sites::{BlobNews, BlobState, Blobs};
use prepull_api::task::{JobUid, NodeName, TaskId};
use prepull_api::wire::EdgeMessage;
use prepull_engine::fleet::event::FleetEvent;
use prepull_engine::fleet::session::SessionEvent;
use prepull_engine::sites::Direction;

use crate::verdict;
use crate::world::{World, cpu_time, name, session};

/// The fleet that the bars are for.
const NODES: usize = 10_000;
/// Layers of the image in the row of one site.
const LAYERS: usize = 40;
/// The longest flush of that row.
const BAR_FLUSH: Duration = Duration::from_millis(5);
/// The most bytes of that row, half of the tracker's budget.
const BAR_BYTES: usize = 128 << 20;
/// A flush where nothing happens.
const BAR_IDLE: Duration = Duration::from_micros(5);
/// Flushes in which nothing happens.
const IDLE: u32 = 10_000;
/// Bytes of a layer.
const SIZE: u64 = 10 << 20;
/// Time of a layer over the uplink, and from a neighbour.
const CARRY: SignedDuration = SignedDuration::from_secs(1);
const FETCH: SignedDuration = SignedDuration::from_millis(100);

/// No task ends before the measurement does.
fn never(_: usize) -> SignedDuration {
    SignedDuration::from_hours(1000)
}

/// Prints the rows.
#[allow(clippy::print_stdout)]
pub(crate) fn measure(memory: PeakAlloc) {
    println!(
        "\nsite: {LAYERS} layers for all nodes of one site; then sites of one node in which nothing happens"
    );
    for nodes in [NODES / 10, NODES] {
        let (world, began) = (start_world(nodes, 1), cpu_time());
        let (mut world, used) = (world, memory.current_usage());
        let (counted, held) = share_layers(&mut world, nodes, || memory.current_usage().saturating_sub(used));
        let (took, longest) = (cpu_time().saturating_sub(began), world.figures.longest_flush);
        let each = took / u32::try_from(nodes * LAYERS).unwrap_or(u32::MAX);
        println!(
            "{nodes:>8} {took:>6.1?} for all, {each:.1?} a layer of a node, longest flush {longest:.1?}, \
             {} MiB by its own count, {} MiB of the heap",
            counted >> 20,
            held >> 20,
        );
        if nodes == NODES {
            println!(
                "         bars: a flush of {BAR_FLUSH:?} {}, {} MiB {}",
                verdict(longest <= BAR_FLUSH),
                BAR_BYTES >> 20,
                verdict(counted.max(held) <= BAR_BYTES),
            );
        }
    }
    let mut world = start_world(NODES, NODES);
    for index in 0..NODES {
        send_blobs(&mut world, SignedDuration::ZERO, &name(index), vec![layer_news(0, BlobState::Here)]);
    }
    world.run_for(SignedDuration::from_mins(2));
    let began = cpu_time();
    for _ in 0..IDLE {
        world.idle_batch();
    }
    let idle = cpu_time().saturating_sub(began) / IDLE;
    println!(
        "{NODES:>8} sites, {} MiB by its own count, a batch {idle:.1?}; bar: {BAR_IDLE:?} {}",
        world.site_bytes() >> 20,
        verdict(idle <= BAR_IDLE),
    );
}

/// Nodes that work on a task each.
fn start_world(nodes: usize, sites: usize) -> World {
    let mut world = World::of_sites(nodes, sites, never);
    world.make_job("job", None);
    world.run_for(SignedDuration::from_mins(1));
    world.figures.longest_flush = Duration::ZERO;
    world
}

/// All nodes want all layers at once, and get them. Returns the most bytes by the tracker's count, and of the heap then.
fn share_layers(world: &mut World, nodes: usize, held: impl Fn() -> usize) -> (usize, usize) {
    for index in 0..nodes {
        let wanted = (0..LAYERS).map(|layer| layer_news(layer, BlobState::Wanted)).collect();
        send_blobs(world, SignedDuration::ZERO, &name(index), wanted);
    }
    let (mut done, mut most) = (HashSet::new(), (0, 0));
    while done.len() < nodes * LAYERS {
        assert!(world.step(), "{} layers have arrived", done.len());
        for directions in world.take_directions() {
            let (mut carried, mut fetched) = (Vec::new(), Vec::new());
            for (digest, direction) in directions.blobs {
                let of = match direction {
                    Direction::Wait => continue,
                    Direction::Registry { .. } => &mut carried,
                    Direction::Peers(_) => &mut fetched,
                };
                if done.insert((directions.node.clone(), digest.clone())) {
                    of.push(digest);
                }
            }
            for (digests, state, wait) in
                [(carried, BlobState::Carrying, CARRY), (fetched, BlobState::Fetching, FETCH)]
            {
                let all = |state| digests.iter().map(|digest| blob_news(digest.clone(), state)).collect();
                send_blobs(world, SignedDuration::ZERO, &directions.node, all(state));
                send_blobs(world, wait, &directions.node, all(BlobState::Here));
            }
        }
        if world.site_bytes() > most.0 {
            most = (world.site_bytes(), held());
        }
    }
    world.run_for(SignedDuration::from_secs(10));
    most
}

fn layer_news(layer: usize, state: BlobState) -> BlobNews {
    blob_news(format!("sha256:{layer:064x}"), state)
}

fn blob_news(digest: String, state: BlobState) -> BlobNews {
    BlobNews { digest, size: SIZE, state, done: if state == BlobState::Here { SIZE } else { 0 } }
}

fn send_blobs(world: &mut World, wait: SignedDuration, node: &NodeName, blobs: Vec<BlobNews>) {
    if blobs.is_empty() {
        return;
    }
    let task = TaskId { job: JobUid("job".to_owned()), attempt: 1 };
    let message = EdgeMessage::Blobs(Blobs { task, blobs, failures: Vec::new(), reads_streams: true });
    let event = SessionEvent::Message { node: node.clone(), session: session(node), message };
    world.happens_after(wait, FleetEvent::Session(event).into());
}
