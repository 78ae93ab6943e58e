//! A stolen box: it has a node's certificate, and a script of the test speaks to the cloud for it. Its door answers
//! neighbours with garbage, 404 or nothing.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use prepull_api::sites::{
    BlobNews, BlobSources, BlobState, Blobs, From, LEAST_SHARED, PeerDoor, PeerFailure,
};
use prepull_api::task::TaskId;
use prepull_api::wire::{CloudMessage, EdgeMessage, Hello};
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::liar::{Answer, Liar};
use super::scene::{Boxes, SITE};
use crate::background;
use crate::cleanup::Child;
use crate::images::Image;
use crate::intruder::{Intruder, Wire};
use crate::network::Outlet;
use crate::place::Place;
use crate::sim::certificates::CloudAuthority;

/// Time after which the script acts again although the cloud says nothing.
const TICK: Duration = Duration::from_millis(50);
/// Wait before a session that has ended begins again.
const REDIAL: Duration = Duration::from_millis(500);
/// Port at which the agents of the site serve.
const PORT: u16 = 10_006;

/// A stolen box at the site.
pub struct Stolen {
    /// Its place in the network.
    pub outlet: Outlet,
    intruder: Intruder,
    state: PathBuf,
    door: Liar,
    place: Arc<Place>,
}

/// What happens to a stolen box.
#[derive(Debug)]
pub enum Cue {
    /// A task has arrived.
    Task,
    /// The cloud names the sources of blobs.
    Sources(BlobSources),
    /// Some time has passed.
    Tick,
}

/// What a script says in answer.
#[derive(Debug, Default)]
pub struct Line {
    /// Blobs.
    pub blobs: Vec<BlobNews>,
    /// Complaints.
    pub failures: Vec<PeerFailure>,
}

impl Stolen {
    /// Plugs a stolen box into the site, with a door that gives this answer.
    pub async fn join(boxes: &Boxes, name: &str, answer: Answer) -> Result<Self> {
        let outlet = boxes.lan.add_outlet().await?;
        boxes.cluster.node(name).edge().ready().label(SITE.0, SITE.1).create().await?;
        let intruder = Intruder::of(&boxes.cluster, &boxes.cloud, name).await?;
        let state = boxes.cluster.place().new_dir(name)?;
        CloudAuthority::from_cluster(&boxes.cluster).await?.join(&state, name)?;
        let door = Liar::answering(&outlet, &state, &boxes.image, answer)?;
        let place = Arc::clone(boxes.cluster.place());
        Ok(Self { outlet, intruder, state, door, place })
    }

    /// Number of requests of neighbours that it has answered.
    pub fn asked(&self) -> u64 {
        self.door.lies()
    }

    /// Begins to act: accepts every task, and sends what the script answers to each cue. Ends when the guard is dropped.
    pub async fn act(&self, script: impl FnMut(Cue) -> Line + Send + 'static) -> Result<DropGuard> {
        let door = PeerDoor { addresses: vec![Liar::address(&self.outlet).to_string()], streams: true };
        let hello = Hello { peer: Some(door), max_tasks: Some(4), ..Hello::default() };
        let wire = self.intruder.open_session_with(hello.clone()).await?;
        let (stop, intruder) = (CancellationToken::new(), self.intruder.clone());
        let acting = stop.clone().run_until_cancelled_owned(async move {
            let (mut wire, mut script, mut task) = (wire, script, None);
            loop {
                let _ = play(&mut wire, &mut task, &mut script).await;
                tokio::time::sleep(REDIAL).await;
                if let Ok(again) = intruder.open_session_with(hello.clone()).await {
                    wire = again;
                }
            }
        });
        background::runtime()?.spawn(acting);
        Ok(stop.drop_guard())
    }

    /// Starts to read a blob from a neighbour at a rate such as `1k`. It ends when dropped.
    pub fn read_slowly(&self, from: &SocketAddr, digest: &str, ticket: &str, rate: &str) -> Result<Child> {
        let pki = self.state.join("pki");
        let mut command = Command::new("curl");
        command.args([
            "--silent",
            "--insecure",
            "--no-buffer",
            "--output",
            "/dev/null",
            "--limit-rate",
            rate,
        ]);
        command.arg("--cert").arg(pki.join("client.crt")).arg("--key").arg(pki.join("client.key"));
        command.arg("--header").arg(format!("Authorization: Ticket {ticket}"));
        command.arg(format!("https://{from}/blobs/{digest}"));
        Child::spawn(&self.place, "slow-reader", self.outlet.space().wrap_command(&command))
    }

    /// Opens a TCP connection to where a box serves, and says nothing.
    pub fn knock(&self, at: &Outlet) -> Result<TcpStream> {
        self.outlet.open((at.address(), PORT).into())
    }
}

/// Plays one session, until it ends.
async fn play(
    wire: &mut Wire,
    task: &mut Option<TaskId>,
    script: &mut (impl FnMut(Cue) -> Line + Send),
) -> Result<()> {
    loop {
        let cue = match timeout(TICK, wire.receive()).await {
            Ok(Ok(CloudMessage::Assign(assign))) => {
                let new = assign.task.id;
                wire.send_message(&EdgeMessage::Accepted { task: new.clone() }).await?;
                *task = Some(new);
                Cue::Task
            }
            Ok(Ok(CloudMessage::Sources(sources))) => Cue::Sources(sources),
            Ok(Ok(_)) => continue,
            Ok(Err(error)) => return Err(error),
            Err(_) => Cue::Tick,
        };
        let Some(task) = task else { continue };
        let Line { blobs, mut failures } = script(cue);
        let mut blobs = blobs.as_slice();
        while !blobs.is_empty() || !failures.is_empty() {
            let (first, rest) = blobs.split_at(blobs.len().min(prepull_api::sites::MAX_BLOBS));
            let news = Blobs {
                task: task.clone(),
                blobs: first.to_vec(),
                failures: std::mem::take(&mut failures),
                reads_streams: true,
            };
            wire.send_message(&EdgeMessage::Blobs(news)).await?;
            blobs = rest;
        }
    }
}

/// The layers of an image that are shared, with their sizes.
pub fn layers(image: &Image) -> Result<HashMap<String, u64>> {
    let mut layers = HashMap::new();
    for digest in image.blobs() {
        let size = std::fs::metadata(image.blob_file(digest)).with_context(|| digest.clone())?.len();
        if size >= LEAST_SHARED {
            layers.insert(digest.clone(), size);
        }
    }
    Ok(layers)
}

/// News of a blob.
pub fn news(digest: &str, size: u64, state: BlobState, done: u64) -> BlobNews {
    BlobNews { digest: digest.to_owned(), size, state, done }
}

/// A digest that no blob has.
pub fn invented(number: usize) -> String {
    format!("sha256:{number:064x}")
}

/// The neighbours that are named for each blob.
pub fn peers(sources: &BlobSources) -> impl Iterator<Item = (&str, &prepull_api::sites::BlobPeer)> {
    sources.blobs.iter().flat_map(|blob| {
        let peers = if let From::Peers { peers } = &blob.from { peers.as_slice() } else { &[] };
        peers.iter().map(|peer| (blob.digest.as_str(), peer))
    })
}
