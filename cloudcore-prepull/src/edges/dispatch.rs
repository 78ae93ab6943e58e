//! Dispatch of tasks to the nodes' sessions. Registry credentials and public keys are read here, when the task is sent,
//! and nowhere else.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use prepull_api::credentials::SecretUser;
use prepull_api::download::{DownloadTerms, Verification};
use prepull_api::image::NormalizedReference;
use prepull_api::overriders::SecretRef;
use prepull_api::task::{ImageTask, NodeName, PullPolicy, Task, TaskId};
use prepull_api::wire::{Assign, CloudMessage, PullKey};
use prepull_engine::kruise::node_images::TagDispatch;
use prepull_engine::prepull::controller::Dispatch;
use prepull_engine::prepull::download;
use prepull_engine::prepull::plan::{self, PlannedImage, SecretLookup};
use prepull_engine::shared::access::KeysSent;
use prepull_engine::shared::outcomes::DispatchOutcome;

use crate::edges::tunnel::{SendError, Sessions};
use crate::kube_api::secrets::Secrets;

/// Resolves the keys of a job's task, and queues the task on the node's session.
///
/// If the API server fails to return a secret, the task is postponed after a few seconds; so it is where the owner of one
/// has not allowed the job to use it, as long as there is time to wait for that, and the node has said that it needs it: an
/// image that is there needs no key, so the node is asked first. Cancel-safe: nothing is sent before all
/// keys are resolved.
pub(crate) async fn dispatch_job_task(
    order: &Dispatch,
    secrets: &Secrets,
    sessions: &Sessions,
    share_by_default: bool,
) -> (DispatchOutcome, Option<KeysSent>) {
    let mut sent = None;
    let outcome = resolve_and_send(order, secrets, sessions, share_by_default, &mut sent).await;
    (outcome, sent)
}

/// `sent`: the credentials that go to the node, once they are known.
async fn resolve_and_send(
    order: &Dispatch,
    secrets: &Secrets,
    sessions: &Sessions,
    share_by_default: bool,
    sent: &mut Option<KeysSent>,
) -> DispatchOutcome {
    if order.only_look {
        // What is there needs no key, so no secret is read.
        let keys = std::iter::repeat(PullKey::anonymous());
        let assign = build_assign(order, keys, None, order.remaining, share_by_default);
        return send_assign(&order.node, assign, sessions);
    }
    let begun = Instant::now();
    let remaining = || order.remaining.saturating_sub(begun.elapsed());
    let user = secrets.consent_for(SecretUser::Job(&order.job.name));
    let mut keys = Vec::with_capacity(order.plan.images.len());
    // Whether the node needs none of the withheld keys if it already has those images.
    let mut may_need_none = true;
    let title = job_title(order);
    let (mut withheld, mut reason) = (Vec::new(), None);
    let mut note = |details: &[String], of: Vec<SecretRef>, unavailable: Option<&String>| {
        secrets.withheld().log(&title, details, begun);
        if !of.is_empty() {
            reason = reason.take().or_else(|| unavailable.cloned());
            withheld.extend(of);
        }
    };
    for (index, image) in order.plan.images.iter().enumerate() {
        let found = match read_secrets(&image.secrets, &|_| user, secrets).await {
            Ok(found) => found,
            Err(postponed) => return postponed,
        };
        let resolved = plan::resolve_key(&image.secrets, &image.pull, user, found);
        let unavailable = match &resolved.key {
            PullKey::Unavailable { reason } => Some(reason),
            PullKey::Anonymous { .. } | PullKey::Credentials { .. } | PullKey::Other => None,
        };
        let is_pulled_anyway = image.policy == PullPolicy::Always && !order.there.contains(&index);
        may_need_none &= resolved.withheld.is_empty() || !is_pulled_anyway;
        note(&resolved.details, resolved.withheld, unavailable);
        keys.push(resolved.key);
    }
    let images = order.plan.images.iter().map(|image| (&image.pull, &*image.secrets));
    *sent = keys_sent(images.zip(&keys));
    let mut verification = None;
    if let Some(policy) = &order.job.download.verify {
        let found = match read_secrets(&policy.keys, &|_| user, secrets).await {
            Ok(found) => found,
            Err(postponed) => return postponed,
        };
        let resolved = plan::resolve_verification(policy, user, found);
        may_need_none &= resolved.withheld.is_empty();
        note(&resolved.details, resolved.withheld, resolved.verification.unavailable.as_ref());
        verification = Some(resolved.verification);
    }
    if reason.is_some() && order.asks_first && may_need_none {
        let assign = build_assign(order, keys, verification, remaining(), share_by_default);
        return match send_assign(&order.node, assign, sessions) {
            DispatchOutcome::Sent(session) => DispatchOutcome::SentWithoutKeys(session),
            other => other,
        };
    }
    if let Some(reason) = reason.filter(|_| order.may_wait) {
        secrets.withheld().add_waits(&order.job.uid, &order.job.name, &withheld, begun);
        let secrets = withheld.iter().map(ToString::to_string).collect();
        return DispatchOutcome::Withheld { secrets, reason };
    }
    send_assign(&order.node, build_assign(order, keys, verification, remaining(), share_by_default), sessions)
}

/// Does the same as [`dispatch_job_task`] for a task of a NodeImage. `share` decides whether the node shares layers
/// with its site. The task waits for no owner: another secret may give what one withholds.
pub(crate) async fn dispatch_node_image_task(
    order: TagDispatch,
    secrets: &Secrets,
    sessions: &Sessions,
    share: bool,
) -> (DispatchOutcome, Option<KeysSent>) {
    let begun = Instant::now();
    let node_image = secrets.consent_for(SecretUser::NodeImage(&order.node.0));
    let user = |secret: &SecretRef| node_image.filter(|_| !order.of_jobs.contains(secret));
    let found = match read_secrets(&order.secrets, &user, secrets).await {
        Ok(found) => found,
        Err(postponed) => return (postponed, None),
    };
    let resolved = plan::resolve_pull_secrets(&order.secrets, &order.reference, user, found);
    secrets.withheld().log(&format!("nodeimage/{}", order.node), &resolved.details, begun);
    let remaining = order.remaining.saturating_sub(begun.elapsed());
    let sent = keys_sent(std::iter::once(((&order.reference, &*order.secrets), &resolved.key)));
    let outcome = send_assign(
        &order.node,
        Assign {
            task: order.task,
            remaining,
            keys: vec![resolved.key],
            download: DownloadTerms { share, ..DownloadTerms::default() },
        },
        sessions,
    );
    (outcome, sent)
}

/// The credentials that a task is sent with, for its images that name secrets. `None`: no image does.
fn keys_sent<'a>(
    images: impl Iterator<Item = ((&'a NormalizedReference, &'a [SecretRef]), &'a PullKey)>,
) -> Option<KeysSent> {
    // Another one in each process: a fingerprint outside of it reveals nothing of a password.
    static STATE: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    let mut fingerprints = BTreeSet::new();
    for ((reference, secrets), key) in images {
        match key {
            _ if secrets.is_empty() => {}
            PullKey::Credentials { credentials } => {
                fingerprints.insert(STATE.hash_one((reference.to_string(), credentials)));
            }
            PullKey::Anonymous { .. } | PullKey::Unavailable { .. } | PullKey::Other => {
                return Some(KeysSent::Missing);
            }
        }
    }
    (!fingerprints.is_empty()).then(|| KeysSent::All(STATE.hash_one(fingerprints)))
}

/// The job, as logs of both sides name it.
fn job_title(order: &Dispatch) -> String {
    format!("imageprepulljob/{}", order.job.name)
}

fn send_assign(node: &NodeName, assign: Assign, sessions: &Sessions) -> DispatchOutcome {
    match sessions.send(node, CloudMessage::Assign(assign)) {
        Ok(session) => DispatchOutcome::Sent(session),
        Err(error @ SendError::TooOld(_)) => DispatchOutcome::TooOld(error.to_string()),
        Err(error @ SendError::TooLarge(_)) => {
            DispatchOutcome::Unsendable(format!("the task cannot be sent: {error}; use fewer images"))
        }
        Err(SendError::Offline | SendError::Full) => DispatchOutcome::Offline,
    }
}

/// Builds the message for a job's task, with one key for each image in order. Pure.
pub fn build_assign(
    order: &Dispatch,
    keys: impl IntoIterator<Item = PullKey>,
    verification: Option<Verification>,
    remaining: Duration,
    share_by_default: bool,
) -> Assign {
    let mut table = KeyTable::default();
    let image = |((index, image), key): ((usize, &PlannedImage), PullKey)| ImageTask {
        image: image.image.clone(),
        reference: image.pull.to_string(),
        policy: match image.policy {
            // An agent of any version knows this policy: it looks, and downloads nothing.
            _ if order.only_look => PullPolicy::Never,
            // A retry does not ask the registry again for images that an earlier attempt has pulled.
            PullPolicy::Always if order.there.contains(&index) => PullPolicy::IfNotPresent,
            policy => policy,
        },
        retries: order.job.retries,
        key: table.intern(key),
        timeout: None,
        sandbox: None,
    };
    let task = Task {
        id: TaskId { job: order.job.uid.clone(), attempt: order.attempt },
        title: job_title(order),
        checks: if order.only_look { Vec::new() } else { order.job.checks.clone() },
        images: order.plan.images.iter().enumerate().zip(keys).map(image).collect(),
        removal: order.plan.removal.as_deref().cloned().map(Box::new),
        upgrade: order.plan.upgrade.filter(|_| !order.only_look),
    };
    let download = if order.only_look {
        // An image that was removed and pulled again by the kubelet has lost its pin.
        DownloadTerms { pin: order.job.download.pin, ..DownloadTerms::default() }
    } else {
        download::download_terms(&order.job, &order.node, verification, share_by_default)
    };
    Assign { task, remaining, keys: table.keys, download }
}

/// The distinct keys of a message. Images with the same key share one entry.
#[derive(Default)]
struct KeyTable {
    keys: Vec<PullKey>,
}

impl KeyTable {
    /// Adds the key unless it is there, and returns its index.
    fn intern(&mut self, key: PullKey) -> u32 {
        let at = self.keys.iter().position(|known| *known == key).unwrap_or_else(|| {
            self.keys.push(key);
            self.keys.len() - 1
        });
        // Always fits: a task has at most MAX_IMAGES images.
        u32::try_from(at).unwrap_or(u32::MAX)
    }
}

/// Reads the secrets, and returns a look-up by name. Fails if one of them cannot be read for now.
async fn read_secrets<'a>(
    names: &[SecretRef],
    user: &(dyn Fn(&SecretRef) -> Option<SecretUser<'a>> + Sync),
    secrets: &Secrets,
) -> Result<impl Fn(&SecretRef) -> SecretLookup + use<>, DispatchOutcome> {
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        let lookup = secrets.get(name, user(name)).await;
        if let SecretLookup::Error(reason) = lookup {
            return Err(DispatchOutcome::Postponed(plan::unreadable_text(name, user(name), &reason)));
        }
        found.push((name.clone(), lookup));
    }
    Ok(move |secret: &SecretRef| {
        found
            .iter()
            .find(|(name, _)| name == secret)
            .map_or(SecretLookup::Missing, |(_, lookup)| lookup.clone())
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use prepull_api::credentials::{RegistryCredential, Sensitive};
    use prepull_api::image::Reference;

    use super::*;

    #[test]
    fn equal_credentials_have_equal_fingerprints() {
        let (images, secret) = (["a", "b"], SecretRef::parse("shop/registry").unwrap());
        let images = images.map(|image| Reference::parse(image).unwrap().normalized());
        let key = |user: &str| {
            let username = Sensitive::new(user);
            let credentials = vec![RegistryCredential { username, ..RegistryCredential::default() }];
            PullKey::Credentials { credentials }
        };
        let none = || PullKey::Unavailable { reason: String::new() };
        let sent = |order: [usize; 2], keys: [PullKey; 2], secrets: &[SecretRef]| {
            keys_sent(order.map(|index| (&images[index], secrets)).into_iter().zip(&keys))
        };
        let secrets = [secret];
        let first = sent([0, 1], [key("x"), key("y")], &secrets);
        assert!(matches!(first, Some(KeysSent::All(_))));
        assert_eq!(sent([1, 0], [key("y"), key("x")], &secrets), first, "the order is of no matter");
        assert_ne!(sent([0, 1], [key("y"), key("x")], &secrets), first);
        assert_eq!(sent([0, 1], [key("x"), none()], &secrets), Some(KeysSent::Missing));
        assert_eq!(sent([0, 1], [PullKey::anonymous(), none()], &[]), None);
    }
}
