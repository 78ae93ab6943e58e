//! Sites with one stolen box that lies: the others get the image in time, and the uplink carries little more than it.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use prepull_api::sites::{BlobPeer, BlobSource, BlobState, From, PeerFailure, PeerFault};
use prepull_api::task::NodeName;
use prepull_e2e::boxes::stolen::{Cue, Line, invented, layers, news, peers};
use prepull_e2e::boxes::{Answer, SERVING, SITE, Stolen};
use prepull_e2e::prelude::*;
use prepull_e2e::usage::Usage;
use serde_json::json;
use tokio::sync::Notify;
use tokio_util::sync::DropGuard;

/// Limit for a job, far beyond what any of them may take.
const LIMIT: Duration = Duration::from_secs(150);
/// Bits a second of the uplink: the image takes some four seconds.
const RATE: u64 = 24_000_000;
/// Honest boxes.
const HONEST: u8 = 3;
/// What a busy machine may add to twice the honest time, in seconds. Without a defence each attack cost a minute or more.
const SLACK: f64 = 15.0;
/// Head start of the stolen box, longer than the tracker waits before it gives a lease.
const ALONE: Duration = Duration::from_secs(2);
/// The bounds of any attack.
const HOLDS: Bounds = Bounds { times: 2.0, percent: 150 };
/// Name of the stolen box.
const LIAR: &str = "liar";

/// A site with a stolen box, and the honest cost of its image.
struct Scene {
    boxes: Boxes,
    stolen: Stolen,
    layers: HashMap<String, u64>,
    honest: Cost,
}

/// The cost of a job for the honest boxes.
#[derive(Clone, Copy, Debug)]
struct Cost {
    seconds: f64,
    down: u64,
}

/// What an attack may cost, as parts of the honest cost.
#[derive(Clone, Copy)]
struct Bounds {
    times: f64,
    percent: u64,
}

impl Scene {
    /// Starts a site, and a job that gives the stolen box a task for the image.
    async fn start(answer: Answer) -> Result<Self> {
        let plan = Plan {
            boxes: HONEST,
            uplink: Uplink::with_rate(RATE),
            layers: vec![4 * MIB, 3 * MIB, 2 * MIB, MIB],
            agent: vec![SERVING.to_owned()],
            cloud: vec!["--heartbeat=1s".to_owned()],
        };
        let boxes = Boxes::start(&plan).await?;
        let honest = pull(&boxes, "honest", boxes.names(HONEST.into()), None).await?;
        boxes.forget_image().await?;
        let stolen = Stolen::join(&boxes, LIAR, answer).await?;
        begin(&boxes, "task-of-liar", &[LIAR.to_owned()], None).await?;
        let layers = layers(&boxes.image)?;
        Ok(Self { boxes, stolen, layers, honest })
    }

    /// The honest boxes pull the image within the bounds while the stolen box plays its script.
    async fn holds(&self, attack: &str, script: impl FnMut(Cue) -> Line + Send + 'static) -> Result<()> {
        let cost = self.attack(attack, script).await?;
        HOLDS.check(attack, cost, self.honest)
    }

    async fn attack(&self, attack: &str, script: impl FnMut(Cue) -> Line + Send + 'static) -> Result<Cost> {
        let _acting = self.act(script).await?;
        // A lease without a predecessor waits for others to come: the liar is first.
        tokio::time::sleep(ALONE).await;
        self.pulls(attack).await
    }

    /// Lets the stolen box act. It has spoken once when this returns.
    async fn act(&self, mut script: impl FnMut(Cue) -> Line + Send + 'static) -> Result<DropGuard> {
        let spoke = Arc::new(AtomicBool::new(false));
        let speaks = Arc::clone(&spoke);
        let acting = self
            .stolen
            .act(move |cue| {
                let line = script(cue);
                speaks.store(true, Ordering::SeqCst);
                line
            })
            .await?;
        eventually("the stolen box speaks", SOON, async || {
            ensure!(spoke.load(Ordering::SeqCst), "it has no task");
            Ok(())
        })
        .await?;
        Ok(acting)
    }

    /// The honest boxes pull the image.
    #[allow(clippy::print_stdout, reason = "the figures of an attack")]
    async fn pulls(&self, attack: &str) -> Result<Cost> {
        let cost = pull(&self.boxes, attack, self.boxes.names(HONEST.into()), None).await?;
        println!("{attack}: {cost:?}, honest {:?}, asked {}", self.honest, self.stolen.asked());
        self.boxes.forget_image().await?;
        Ok(cost)
    }
}

impl Bounds {
    fn check(self, attack: &str, cost: Cost, honest: Cost) -> Result<()> {
        let Self { times, percent } = self;
        ensure!(cost.seconds <= times * honest.seconds + SLACK, "{attack}: {cost:?}, and {honest:?} without");
        ensure!(cost.down * 100 <= honest.down * percent, "{attack}: {cost:?}, and {honest:?} without");
        Ok(())
    }
}

/// Begins a job over these nodes, which share.
async fn begin(boxes: &Boxes, name: &str, on: &[String], rate: Option<&str>) -> Result<Job> {
    let job = boxes.cluster.job(name).images([&boxes.reference]).on(on).retries(10);
    let job = job.timeout_seconds(3600).concurrency(i64::try_from(on.len())?).tolerate("1").build();
    let mut job = serde_json::to_value(job)?;
    job["spec"]["download"] = json!({"shareWithinSite": true, "maxSiteRate": rate});
    Ok(boxes.cluster.apply_job(&job.to_string()).await?.within(LIMIT))
}

/// Pulls the image onto the honest boxes among these.
async fn pull(boxes: &Boxes, name: &str, on: Vec<String>, rate: Option<&str>) -> Result<Cost> {
    let (begun, down) = (Instant::now(), boxes.lan.carried_down().await?);
    let job = begin(boxes, name, &on, rate).await?;
    job.until("the honest boxes have it", |status| status.summary.successful >= u32::from(HONEST)).await?;
    let down = boxes.lan.carried_down().await? - down;
    let cost = Cost { seconds: begun.elapsed().as_secs_f64(), down };
    job.delete().await?;
    Ok(cost)
}

/// Says that it has all of these, whatever it hears.
fn has_all(layers: &HashMap<String, u64>) -> impl FnMut(Cue) -> Line + Send + use<> {
    let layers = layers.clone();
    move |_| {
        let blobs = layers.iter().map(|(digest, size)| news(digest, *size, BlobState::Here, *size));
        Line { blobs: blobs.collect(), ..Line::default() }
    }
}

/// Wants all of these, and with a lease reports progress that never ends.
fn carries_all(layers: &HashMap<String, u64>) -> impl FnMut(Cue) -> Line + Send + use<> {
    let (layers, mut leases, mut more) = (layers.clone(), HashSet::new(), 0);
    move |cue| {
        if let Cue::Sources(sources) = cue {
            for BlobSource { digest, from } in sources.blobs {
                match from {
                    From::Registry { .. } => _ = leases.insert(digest),
                    _ => _ = leases.remove(&digest),
                }
            }
        }
        more += 10_000;
        let news_of = |(digest, size): (&String, &u64)| {
            if leases.contains(digest) {
                news(digest, *size, BlobState::Carrying, more.min(size - 1))
            } else {
                news(digest, *size, BlobState::Wanted, 0)
            }
        };
        let blobs = layers.iter().map(news_of);
        Line { blobs: blobs.collect(), ..Line::default() }
    }
}

#[tokio::test]
async fn claims_of_invented_layers_take_nothing() -> Result<()> {
    let scene = Scene::start(Answer::NotFound).await?;
    let mut done = 0;
    let claims = move |_| {
        done += 1000;
        let blobs = (0..6).map(|number| news(&invented(number), 64 * MIB, BlobState::Carrying, done));
        Line { blobs: blobs.collect(), ..Line::default() }
    };
    scene.holds("claims", claims).await?;

    let mut has_spoken = false;
    let books = move |_| {
        let count = if std::mem::replace(&mut has_spoken, true) { 0 } else { 4096 };
        let blobs = (0..count).map(|number| news(&invented(number), MIB, BlobState::Wanted, 0));
        Line { blobs: blobs.collect(), ..Line::default() }
    };
    scene.holds("books", books).await?;

    // In the same job, so that it divides the same limit.
    let mut done = 0;
    let divides = move |_| {
        done += 1000;
        let blobs = (0..500).map(|number| news(&invented(number), 64 * MIB, BlobState::Carrying, done));
        let wants = (500..510).map(|number| news(&invented(number), 64 * MIB, BlobState::Wanted, 0));
        Line { blobs: blobs.chain(wants).collect(), ..Line::default() }
    };
    let _acting = scene.act(divides).await?;
    let mut on = scene.boxes.names(HONEST.into());
    on.push(LIAR.to_owned());
    let cost = pull(&scene.boxes, "rate", on, Some("2Mi")).await?;
    println!("rate: {cost:?}");
    let honest = scene.honest.seconds.max(5.0);
    ensure!(cost.seconds <= HOLDS.times * honest + SLACK, "the limit of the site was divided: {cost:?}");
    Ok(())
}

#[tokio::test]
async fn a_box_that_moves_leaves_nothing_behind() -> Result<()> {
    /// What the cloud may grow by.
    const GROWTH: u64 = 24 << 20;
    /// Blobs that the liar names at each of its sites.
    const BLOBS: usize = 512;
    const MOVES: usize = 200;
    let scene = Scene::start(Answer::NotFound).await?;
    let cluster = &scene.boxes.cluster;
    let rss = || anyhow::Ok(Usage::of_process(scene.boxes.cloud.process()?.pid())?.rss);
    let before = rss()?;
    let spoke = Arc::new(Notify::new());
    let (mut first, speaks) = (0, Arc::clone(&spoke));
    let moves = move |_| {
        first += BLOBS;
        speaks.notify_one();
        let blobs = (first..first + BLOBS).map(|number| news(&invented(number), MIB, BlobState::Here, MIB));
        Line { blobs: blobs.collect(), ..Line::default() }
    };
    {
        let _acting = scene.act(moves).await?;
        for number in 0..MOVES {
            cluster.label_node(LIAR, SITE.0, Some(&format!("site-{number}"))).await?;
            spoke.notified().await;
        }
        let after = rss()?;
        println!("moves: {before} to {after} bytes");
        ensure!(after <= before + GROWTH, "the cloud has grown from {before} to {after} bytes");
    }
    cluster.label_node(LIAR, SITE.0, Some(SITE.1)).await?;
    let cost = scene.pulls("after-moves").await?;
    HOLDS.check("after-moves", cost, scene.honest)
}

#[tokio::test]
async fn slander_keeps_no_box_from_its_neighbours() -> Result<()> {
    let scene = Scene::start(Answer::NotFound).await?;
    let of = scene.layers.clone();
    let sizes = move |_| {
        let blobs = of.iter().map(|(digest, size)| news(digest, size + 1, BlobState::Wanted, 0));
        Line { blobs: blobs.collect(), ..Line::default() }
    };
    scene.holds("sizes", sizes).await?;

    scene.holds("has-nothing", has_all(&scene.layers)).await?;
    ensure!(scene.stolen.asked() > 0, "no box asked the liar");

    let asked = scene.stolen.asked();
    scene.holds("carries-nothing", carries_all(&scene.layers)).await?;
    println!("asked {} more", scene.stolen.asked() - asked);

    let (of, names) = (scene.layers.clone(), scene.boxes.names(HONEST.into()));
    let slander = move |_| {
        let blobs = of.iter().map(|(digest, size)| news(digest, *size, BlobState::Wanted, 0)).collect();
        let of_one = |digest: &String| {
            let failure = |name: &String| PeerFailure {
                digest: digest.clone(),
                peer: NodeName(name.clone()),
                fault: PeerFault::Gone,
            };
            names.iter().map(failure).collect::<Vec<_>>()
        };
        Line { blobs, failures: of.keys().flat_map(of_one).collect() }
    };
    scene.holds("slander", slander).await?;
    Ok(())
}

#[tokio::test]
async fn garbage_and_trickles_stop_no_box() -> Result<()> {
    let scene = Scene::start(Answer::Garbage).await?;
    // The first stream of wrong bytes costs more, in whichever attack a box reads one: the decision says how much.
    let costly = Bounds { times: 4.0, percent: 250 };
    let first = scene.attack("garbage", carries_all(&scene.layers)).await?;
    ensure!(scene.stolen.asked() > 0, "no box asked the liar");
    let second = scene.attack("garbage-again", carries_all(&scene.layers)).await?;
    let (less, more) = if first.down <= second.down { (first, second) } else { (second, first) };
    HOLDS.check("garbage", less, scene.honest)?;
    costly.check("garbage", more, scene.honest)?;

    let tickets = Arc::new(Mutex::new(Vec::new()));
    let (of, noted) = (scene.layers.clone(), Arc::clone(&tickets));
    let reads = move |cue: Cue| {
        if let Cue::Sources(sources) = &cue {
            let all = peers(sources).map(|(digest, peer)| (digest.to_owned(), peer.clone()));
            noted.lock().unwrap_or_else(PoisonError::into_inner).extend(all);
            return Line::default();
        }
        let blobs = of.iter().map(|(digest, size)| news(digest, *size, BlobState::Wanted, 0));
        Line { blobs: blobs.collect(), ..Line::default() }
    };
    let _acting = scene.act(reads).await?;
    let readers = AtomicUsize::new(0);
    tokio::select! {
        cost = scene.pulls("trickle") => HOLDS.check("trickle", cost?, scene.honest)?,
        never = annoy(&scene, &tickets, &readers) => match never? {},
    }
    ensure!(readers.load(Ordering::SeqCst) > 0, "the liar read from no box");
    Ok(())
}

/// Uses each ticket to read as slowly as curl can, and opens seven silent connections a second to each door.
async fn annoy(
    scene: &Scene,
    tickets: &Mutex<Vec<(String, BlobPeer)>>,
    readers: &AtomicUsize,
) -> Result<Infallible> {
    let (mut silent, mut slow) = (Vec::new(), Vec::new());
    loop {
        let new = std::mem::take(&mut *tickets.lock().unwrap_or_else(PoisonError::into_inner));
        for (digest, peer) in new {
            for address in peer.addresses.iter().filter_map(|address| address.parse().ok()) {
                slow.push(scene.stolen.read_slowly(&address, &digest, &peer.ticket, "1k")?);
            }
        }
        readers.store(slow.len(), Ordering::SeqCst);
        for found in &scene.boxes.all {
            silent.extend(scene.stolen.knock(&found.outlet));
        }
        tokio::time::sleep(Duration::from_secs(1) / 7).await;
    }
}
