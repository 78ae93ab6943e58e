//! Watches for the consent of the owners of secrets that jobs wait for.

use std::time::{Duration, Instant};

use futures::future::join_all;
use prepull_api::credentials::SecretUser;
use prepull_engine::engine::Input;
use prepull_engine::prepull::controller;
use tokio::sync::mpsc;

use crate::kube_api::secrets::Secrets;

/// Time between two looks at these secrets. A person who has just annotated one watches for the effect.
const LOOK: Duration = Duration::from_secs(2);

/// Reads the secrets that jobs wait for, and sends the engine each one that a job may use now. Nothing else about a
/// secret reaches the job: its author may not know that the secret exists.
pub(crate) async fn watch_for_consents(secrets: Secrets, inputs: mpsc::Sender<Input>) {
    loop {
        tokio::time::sleep(LOOK).await;
        let looks = secrets.withheld().by_secret(Instant::now()).into_iter().map(async |(secret, jobs)| {
            let found = secrets.look_again(&secret).await;
            (found, secret, jobs)
        });
        for (found, secret, jobs) in join_all(looks).await {
            let Some(found) = found else { continue };
            for (job, name) in jobs {
                if found.is_allowed_to(SecretUser::Job(&name)) {
                    secrets.withheld().end_wait(&secret, &job);
                    let secret = secret.to_string();
                    let _ = inputs.send(controller::Input::SecretAllowed { job, secret }.into()).await;
                }
            }
        }
    }
}
