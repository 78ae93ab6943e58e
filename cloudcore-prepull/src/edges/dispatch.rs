//! From a decision to an `Assign` on the node's session. Keys are resolved here, at the moment they are sent,
//! and nowhere else.

use std::time::{Duration, Instant};

use prepull_api::overriders::SecretRef;
use prepull_api::task::{ImageTask, NodeName, PullPolicy, Task, TaskId};
use prepull_api::wire::{Assign, CloudMessage, Key};
use prepull_engine::kruise::node_images::Order;
use prepull_engine::prepull::controller::Dispatch;
use prepull_engine::prepull::plan::{self, PlannedImage, SecretLookup};
use prepull_engine::shared::outcomes::DispatchOutcome;

use crate::edges::tunnel::{SendError, Sessions};
use crate::kube_api::secrets::Secrets;

/// Resolves the keys, and hands the task to the node's session.
///
/// While the API server does not give a secret for a reason that may pass, this waits, as long as the node has
/// time. Cancel-safe: nothing is sent before everything is resolved.
pub async fn dispatch(order: &Dispatch, secrets: &Secrets, sessions: &Sessions) -> DispatchOutcome {
    let begun = Instant::now();
    let remaining = || order.remaining.saturating_sub(begun.elapsed());
    let mut keys = Vec::with_capacity(order.plan.images.len());
    for image in &order.plan.images {
        match look_up(&image.secrets, secrets, remaining()).await {
            Ok(found) => keys.push(plan::resolve_key(&image.secrets, &image.pull, found)),
            Err(unsendable) => return unsendable,
        }
    }
    send(&order.node, assign(order, keys, remaining()), sessions)
}

/// The same for a task of a NodeImage.
pub async fn dispatch_node_image(order: Order, secrets: &Secrets, sessions: &Sessions) -> DispatchOutcome {
    let begun = Instant::now();
    let key = match look_up(&order.secrets, secrets, order.remaining).await {
        Ok(found) => plan::resolve_pull_secrets(&order.secrets, &order.reference, found),
        Err(unsendable) => return unsendable,
    };
    let remaining = order.remaining.saturating_sub(begun.elapsed());
    send(&order.node, Assign { task: order.task, remaining, keys: vec![key] }, sessions)
}

fn send(node: &NodeName, assign: Assign, sessions: &Sessions) -> DispatchOutcome {
    match sessions.send(node, CloudMessage::Assign(assign)) {
        Ok(session) => DispatchOutcome::Sent(session),
        Err(error @ SendError::TooLarge(_)) => {
            DispatchOutcome::Unsendable(format!("the task cannot be sent: {error}; use fewer images"))
        }
        Err(SendError::Offline | SendError::Full) => DispatchOutcome::Offline,
    }
}

/// The message, with one key for each image of the order. Pure.
pub fn assign(order: &Dispatch, keys: impl IntoIterator<Item = Key>, remaining: Duration) -> Assign {
    let mut table = KeyTable::default();
    let image = |((index, image), key): ((usize, &PlannedImage), Key)| ImageTask {
        image: image.image.clone(),
        reference: image.pull.to_string(),
        policy: match image.policy {
            // A further attempt does not ask the registry again for what the first one brought.
            PullPolicy::Always if order.there.contains(&index) => PullPolicy::IfNotPresent,
            policy => policy,
        },
        retries: order.job.retries,
        key: table.index(key),
        timeout: None,
        sandbox: None,
    };
    let task = Task {
        id: TaskId { job: order.job.uid.clone(), attempt: order.attempt },
        title: format!("imageprepulljob/{}", order.job.name),
        checks: order.job.checks.clone(),
        images: order.plan.images.iter().enumerate().zip(keys).map(image).collect(),
    };
    Assign { task, remaining, keys: table.keys }
}

/// Images that share a key share its place in the message.
#[derive(Default)]
struct KeyTable {
    keys: Vec<Key>,
}

impl KeyTable {
    fn index(&mut self, key: Key) -> u32 {
        let at = self.keys.iter().position(|known| *known == key).unwrap_or_else(|| {
            self.keys.push(key);
            self.keys.len() - 1
        });
        // At most MAX_IMAGES of them.
        u32::try_from(at).unwrap_or(u32::MAX)
    }
}

/// The secrets, to be looked up by their names; or that they could not be had in time.
async fn look_up(
    names: &[SecretRef],
    secrets: &Secrets,
    patience: Duration,
) -> Result<impl Fn(&SecretRef) -> SecretLookup + use<>, DispatchOutcome> {
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        let Ok(lookup) = tokio::time::timeout(patience, secrets.get(name)).await else {
            return Err(DispatchOutcome::Unsendable(format!(
                "the secrets {} could not be read in time",
                names.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
            )));
        };
        found.push((name.clone(), lookup));
    }
    Ok(move |secret: &SecretRef| {
        found
            .iter()
            .find(|(name, _)| name == secret)
            .map_or(SecretLookup::Missing, |(_, lookup)| lookup.clone())
    })
}
