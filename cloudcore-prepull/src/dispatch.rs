//! From a decision to an `Assign` on the node's session. Keys are resolved here, at the moment they are sent,
//! and nowhere else.

use std::time::{Duration, Instant};

use prepull_api::task::{ImageTask, PullPolicy, Task, TaskId};
use prepull_api::wire::{Assign, CloudMessage, Key};

use crate::controller::{Dispatch, DispatchOutcome};
use crate::plan::{self, PlannedImage, SecretLookup};
use crate::secrets::Secrets;
use crate::tunnel::SendError;
use crate::tunnel::registry::Sessions;

/// Resolves the keys, and hands the task to the node's session.
///
/// While the API server does not give a secret for a reason that may pass, this waits, as long as the node has
/// time. Cancel-safe: nothing is sent before everything is resolved.
pub async fn dispatch(order: &Dispatch, secrets: &Secrets, sessions: &Sessions) -> DispatchOutcome {
    let begun = Instant::now();
    let remaining = || order.remaining.saturating_sub(begun.elapsed());
    let mut keys = Vec::with_capacity(order.plan.images.len());
    for image in &order.plan.images {
        let Some(key) = resolve(image, secrets, remaining()).await else {
            return DispatchOutcome::Unsendable(format!(
                "the secrets {} could not be read in time",
                image.secrets.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
            ));
        };
        keys.push(key);
    }
    let assign = assign(order, keys, remaining());
    match sessions.send(&order.node, CloudMessage::Assign(assign)) {
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

async fn resolve(image: &PlannedImage, secrets: &Secrets, patience: Duration) -> Option<Key> {
    let mut found = Vec::with_capacity(image.secrets.len());
    for secret in &image.secrets {
        let lookup = tokio::time::timeout(patience, secrets.get(secret)).await.ok()?;
        found.push((secret, lookup));
    }
    let lookup = |secret: &_| {
        found
            .iter()
            .find(|(name, _)| *name == secret)
            .map_or(SecretLookup::Missing, |(_, lookup)| lookup.clone())
    };
    Some(plan::resolve_key(&image.secrets, &image.pull, lookup))
}
