//! One node and its NodeImage.

mod settle;
mod tasks;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use prepull_api::crd::kruise::{
    ImageTagSpec, ImageTagStatus, NodeImage, NodeImageSpec, NodeImageStatus, PullPhase,
};
use prepull_api::selector::Selector;
use prepull_api::task::{JobUid, NodeName};
use prepull_api::wire::truncate_reason;

use super::super::rules::{self, ValidTag};
use super::super::{News, Standing, Wish};
use super::edit::{ended_at, find, is_job, job_of};
use super::work::{State, Work, full_name, refused, task_id};
use super::{Action, Out, Written};
use crate::shared::events::{ObjectEvent, ObjectKind};
use crate::shared::node_view::NodeView;
use crate::shared::objects::{ObjectId, Unreadable};
use crate::shared::pacing::Backoff;
use crate::shared::reasons;
use crate::shared::session::SessionId;

/// After a write that failed, or changed nothing: doubled each time up to the second value.
const WRITE_RETRY: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(30));

/// The label of the nodes that Kruise leaves out, too.
const VIRTUAL: (&str, &str) = ("type", "virtual-kubelet");

/// An image's name, and its tag.
type Key = (String, String);

/// See the module.
#[derive(Debug)]
pub(super) struct Held {
    name: NodeName,
    pub(super) node: Option<NodeView>,
    object: Option<Observed>,
    /// There is an object that cannot be read, or one on its way out: nothing is to be done about it.
    blocked: bool,
    session: Option<SessionId>,
    works: BTreeMap<Key, Work>,
    /// Tags that the rules refuse: they have ended before they began.
    refused: BTreeMap<Key, ImageTagStatus>,
    /// To be written into the spec; with each whether what has ended is to be done again.
    wishes: Vec<(Arc<Wish>, bool)>,
    /// What the jobs were told, of the tags that they own.
    told: HashMap<(JobUid, Key), Standing>,
    write: Writing,
}

/// The NodeImage as the API server has it.
#[derive(Debug)]
struct Observed {
    uid: String,
    version: String,
    labels: Arc<BTreeMap<String, String>>,
    spec: NodeImageSpec,
    status: Option<NodeImageStatus>,
}

/// Of the writes of the NodeImage.
#[derive(Debug)]
struct Writing {
    in_flight: bool,
    /// The version that the write under way replaces.
    replaces: Option<String>,
    /// How many of the wishes are in it.
    wishes: usize,
    backoff: Backoff,
    not_before: Option<Timestamp>,
    /// Of the status.
    last: Option<Timestamp>,
    /// Since when there is progress to tell.
    progress_since: Option<Timestamp>,
}

impl Default for Writing {
    fn default() -> Self {
        Self {
            in_flight: false,
            replaces: None,
            wishes: 0,
            backoff: WRITE_RETRY,
            not_before: None,
            last: None,
            progress_since: None,
        }
    }
}

impl Held {
    pub(super) fn new(name: &NodeName) -> Self {
        Self {
            name: name.clone(),
            node: None,
            object: None,
            blocked: false,
            session: None,
            works: BTreeMap::new(),
            refused: BTreeMap::new(),
            wishes: Vec::new(),
            told: HashMap::new(),
            write: Writing::default(),
        }
    }

    pub(super) fn exists(&self) -> bool {
        self.object.is_some()
    }

    /// Whether there is none, and should be one.
    pub(super) fn is_to_be_made(&self, selector: &Selector) -> bool {
        let wants = |node: &NodeView| {
            let is_virtual = node.labels.get(VIRTUAL.0).is_some_and(|kind| kind == VIRTUAL.1);
            node.ready && !is_virtual && selector.matches(&node.labels)
        };
        self.object.is_none() && !self.blocked && self.node.as_ref().is_some_and(wants)
    }

    /// Whether a write has failed.
    pub(super) fn has_tried(&self) -> bool {
        self.write.backoff.has_failed()
    }

    /// Whether nothing is known of the node any more.
    pub(super) fn is_empty(&self) -> bool {
        self.node.is_none()
            && self.object.is_none()
            && self.session.is_none()
            && !self.blocked
            && !self.write.in_flight
    }

    /// Whether a place on the node would be taken.
    pub(super) fn has_waiting(&self) -> bool {
        self.works.values().any(|work| matches!(work.state, State::Waiting))
    }

    /// The jobs that own tags.
    pub(super) fn owners(&self) -> BTreeSet<JobUid> {
        let images = self.object.iter().flat_map(|object| object.spec.images.values());
        let owners = images.flat_map(|image| &image.tags).flat_map(|tag| &tag.owner_references);
        owners.filter(|owner| is_job(owner)).filter_map(job_of).collect()
    }

    /// A job wants something.
    pub(super) fn ask(&mut self, wish: Arc<Wish>, again: bool) {
        // The later wish of a job replaces the earlier one, unless that is being written.
        let under_way = self.write.wishes;
        let same = |(index, (known, _)): &(usize, &(Arc<Wish>, bool))| {
            *index >= under_way && known.owner.uid == wish.owner.uid
        };
        match self.wishes.iter().enumerate().find(same).map(|(index, _)| index) {
            Some(index) => {
                let again = again || self.wishes[index].1;
                self.wishes[index] = (wish, again);
            }
            None => self.wishes.push((wish, again)),
        }
    }

    /// The API server has an object that cannot be read.
    pub(super) fn unreadable(&mut self, unreadable: Unreadable, out: &mut Out<'_>) {
        let note = format!("the NodeImage cannot be read, nothing is done for it: {}", unreadable.error);
        self.blocked = true;
        out.act(Action::Event(ObjectEvent {
            kind: ObjectKind::NodeImage,
            object: unreadable.id,
            warning: true,
            reason: reasons::INVALID,
            note: truncate_reason(&note),
        }));
    }

    /// A write ended: made, refused because the object was another by then, or failed.
    pub(super) fn written(&mut self, written: &Written, now: Timestamp) {
        self.write.in_flight = false;
        let wishes = std::mem::take(&mut self.write.wishes).min(self.wishes.len());
        let now_is = match written {
            Written::Done(object) => {
                // Each is answered when the object is looked at, also where the answer is the one of before.
                for (wish, _) in self.wishes.drain(..wishes) {
                    if let Some(job) = job_of(&wish.owner) {
                        self.told.remove(&(job, (wish.image.clone(), wish.tag.clone())));
                    }
                }
                object.as_ref()
            }
            Written::Refused(object) => object.as_ref(),
            Written::Failed => return self.back_off(now),
        };
        // A write that has changed nothing would be made again at once, for ever.
        let version = now_is.and_then(|object| object.metadata.resource_version.as_ref());
        let refused = matches!(written, Written::Refused(_));
        if version == self.write.replaces.as_ref() && (version.is_some() || refused) {
            self.back_off(now);
        } else {
            self.write.backoff.reset();
            self.write.not_before = None;
        }
    }

    fn back_off(&mut self, now: Timestamp) {
        self.write.not_before = now.checked_add(self.write.backoff.next_wait()).ok();
    }

    /// Whether this is the object that is held, or none is.
    pub(super) fn is(&self, uid: &str) -> bool {
        self.object.as_ref().is_none_or(|object| object.uid == uid)
    }

    /// The API server has this, or nothing.
    pub(super) fn observe(&mut self, object: Option<Box<NodeImage>>, out: &mut Out<'_>) {
        let Some(object) = object else {
            self.blocked = false;
            if self.object.take().is_some() {
                self.wishes.clear();
                self.forget_works(|_| true, out);
                self.told.clear();
                out.act(Action::News(News::NodeGone(self.name.clone())));
            }
            return;
        };
        if object.metadata.deletion_timestamp.is_some() {
            self.observe(None, out);
            self.blocked = true;
            return;
        }
        let NodeImage { metadata, spec, status } = *object;
        let new = Observed {
            uid: metadata.uid.unwrap_or_default(),
            version: metadata.resource_version.unwrap_or_default(),
            labels: Arc::new(metadata.labels.unwrap_or_default()),
            spec,
            status,
        };
        let before = self.object.as_ref();
        // Versions are of the whole store: an object that was made again is newer, too.
        if before.is_some_and(|before| is_older(&new.version, &before.version)) {
            // What was answered with it is to be told from what is newer.
            self.tell_standings(out);
            return;
        }
        self.blocked = false;
        let is_new = before.is_none_or(|before| before.uid != new.uid);
        if is_new || before.is_some_and(|before| before.labels != new.labels) {
            let (node, labels) = (self.name.clone(), new.labels.clone());
            out.act(Action::News(News::Node { node, labels }));
        }
        if is_new && self.session.is_some() {
            out.act(Action::News(News::Online(self.name.clone(), true)));
        }
        self.object = Some(new);
        self.tell_standings(out);
    }

    /// Tells the jobs how their wishes stand, where that is new.
    fn tell_standings(&mut self, out: &mut Out<'_>) {
        let Some(object) = &self.object else { return };
        let mut standings: HashMap<(JobUid, Key), Standing> = HashMap::new();
        for (name, image) in &object.spec.images {
            for tag in &image.tags {
                let standing = standing(object.status.as_ref(), name, tag);
                for job in tag.owner_references.iter().filter(|owner| is_job(owner)).filter_map(job_of) {
                    standings.insert((job, (name.clone(), tag.tag.clone())), standing);
                }
            }
        }
        let node = &self.name;
        self.told.retain(|what, _| {
            let stays = standings.contains_key(what);
            if !stays {
                out.act(told(node, what.clone(), Standing::Absent));
            }
            stays
        });
        for (what, standing) in standings {
            if self.told.get(&what) != Some(&standing) {
                out.act(told(node, what.clone(), standing));
                self.told.insert(what, standing);
            }
        }
    }

    /// Answers a wish that changes nothing.
    fn answer(&self, wish: &Wish, out: &mut Out<'_>) {
        let Some(job) = job_of(&wish.owner) else { return };
        let what = (job, (wish.image.clone(), wish.tag.clone()));
        let standing = self.told.get(&what).copied().unwrap_or(Standing::Absent);
        out.act(told(&self.name, what, standing));
    }

    /// Brings the works in line with the spec.
    fn align(&mut self, now: Timestamp, out: &mut Out<'_>) {
        let Some(object) = &self.object else { return };
        let mut wanted: HashSet<Key> = HashSet::new();
        for (name, image) in &object.spec.images {
            let has_ended = |tag: &ImageTagSpec| {
                let status = object.status.as_ref();
                status.is_some_and(|status| ended_at(status, name, &tag.tag, tag.version).is_some())
            };
            // Most images of most nodes: their rules need not be asked.
            if image.tags.iter().all(has_ended) {
                continue;
            }
            for (tag, valid) in image.tags.iter().zip(rules::image_rules(name, image)) {
                let key = (name.clone(), tag.tag.clone());
                if has_ended(tag) || !wanted.insert(key.clone()) {
                    continue;
                }
                match valid {
                    Ok(valid) => {
                        self.refused.remove(&key);
                        let known = object.status.as_ref().and_then(|status| find(status, name, &tag.tag));
                        let works = &mut self.works;
                        align_one(works, &object.uid, key, tag, known, valid, out);
                    }
                    Err(words) => {
                        if let Some(mut work) = self.works.remove(&key) {
                            drop_work(&mut work, out);
                        }
                        let known = self.refused.get(&key);
                        if known.is_none_or(|known| known.version != tag.version || known.message != words) {
                            let status = refused(tag, words, now);
                            tell_end(&self.name, &object.uid, &full_name(name, &tag.tag), tag, &status, out);
                            self.refused.insert(key, status);
                        }
                    }
                }
            }
        }
        self.refused.retain(|key, _| wanted.contains(key));
        self.forget_works(|key| !wanted.contains(key), out);
    }

    /// Drops works. What a node has begun is cancelled, what it waits for acknowledged.
    fn forget_works(&mut self, which: impl Fn(&Key) -> bool, out: &mut Out<'_>) {
        self.works.retain(|key, work| {
            let goes = which(key);
            if goes {
                drop_work(work, out);
            }
            !goes
        });
    }
}

const UNWANTED: &str = "the NodeImage does not ask for this any more";

fn drop_work(work: &mut Work, out: &mut Out<'_>) {
    if work.is_out() || work.waits_for_keys {
        out.cancel(work.sent.clone(), UNWANTED);
    }
    if let State::Ended { ack: Some(task), .. } = &work.state {
        out.ack(task.clone());
    }
    give_place(work, out);
}

/// Gives the node's place back, if the work has one.
fn give_place(work: &mut Work, out: &mut Out<'_>) {
    if std::mem::take(&mut work.has_place) {
        out.gave();
    }
}

fn align_one(
    works: &mut BTreeMap<Key, Work>,
    uid: &str,
    key: Key,
    tag: &ImageTagSpec,
    known: Option<&ImageTagStatus>,
    valid: ValidTag,
    out: &mut Out<'_>,
) {
    let id = task_id(uid, &key.0, tag, &valid);
    match works.get_mut(&key) {
        Some(work) if work.task == id => {}
        // One more round of the very same. What runs goes on to its end, and what it brought need not be fetched again.
        Some(work) if work.task.job == id.job && work.is_out() => {
            (work.task, work.version) = (id, tag.version);
        }
        Some(work) => {
            drop_work(work, out);
            works.insert(key, Work::new(id, tag.version, valid));
        }
        None => _ = works.insert(key, Work::new(id, tag.version, valid).resume(known)),
    }
}

fn told(node: &NodeName, (job, (image, tag)): (JobUid, Key), standing: Standing) -> Action {
    Action::News(News::Standing { job, node: node.clone(), image, tag, standing })
}

/// How a tag stands, as the API server has it.
fn standing(status: Option<&NodeImageStatus>, name: &str, tag: &ImageTagSpec) -> Standing {
    let found = status.and_then(|status| find(status, name, &tag.tag));
    match found.filter(|found| found.has_ended(tag.version)) {
        Some(found) => {
            let at = found.completion_time.as_ref().map_or(Timestamp::MIN, |time| time.0);
            match found.phase {
                PullPhase::Succeeded => Standing::Succeeded(at),
                _ => Standing::Failed(at),
            }
        }
        None => Standing::Open,
    }
}

/// Versions of one object are numbers that rise (KEP-5504; etcd's revisions before it was said). Where they are not,
/// whatever comes counts.
fn is_older(version: &str, than: &str) -> bool {
    matches!((version.parse::<u64>(), than.parse::<u64>()), (Ok(version), Ok(than)) if version < than)
}

/// Tells people how a tag ended: on the NodeImage, and on the jobs where it failed.
fn tell_end(
    name: &NodeName,
    uid: &str,
    full: &str,
    tag: &ImageTagSpec,
    status: &ImageTagStatus,
    out: &mut Out<'_>,
) {
    let failed = status.phase != PullPhase::Succeeded;
    let mut tell = |kind, object, note: &str| {
        out.act(Action::Event(ObjectEvent {
            kind,
            object,
            warning: failed,
            reason: if failed { reasons::PULL_IMAGE_FAILED } else { reasons::PULL_IMAGE_SUCCEED },
            note: truncate_reason(note),
        }));
    };
    if !failed {
        let took = status.start_time.as_ref().zip(status.completion_time.as_ref());
        let took = took.map_or(0, |(start, end)| end.0.duration_since(start.0).as_secs());
        tell(
            ObjectKind::NodeImage,
            object_id(name, uid),
            &format!("image {full} is on the node, after {took} s"),
        );
        return;
    }
    let why = &status.message;
    tell(ObjectKind::NodeImage, object_id(name, uid), &format!("image {full}: {why}"));
    for owner in tag.owner_references.iter().filter(|owner| is_job(owner)) {
        let job = ObjectId {
            namespace: owner.namespace.clone().unwrap_or_default(),
            name: owner.name.clone().unwrap_or_default(),
            uid: JobUid(owner.uid.clone().unwrap_or_default()),
        };
        tell(ObjectKind::ImagePullJob, job, &format!("image {full} on node {name}: {why}"));
    }
}

fn object_id(name: &NodeName, uid: &str) -> ObjectId {
    ObjectId { namespace: String::new(), name: name.0.clone(), uid: JobUid(uid.to_owned()) }
}
