//! Secrets that are of no use for now. Their problems go to the log. A job that waits for an owner's consent goes on
//! as soon as the secret has it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prepull_api::overriders::SecretRef;
use prepull_api::task::JobUid;
use tracing::warn;

/// Pairs of job and secret that we check. Each secret is one request in two seconds. Making more jobs gains nothing:
/// the nodes of any further job try again by themselves, within a minute.
const WAITS: usize = 64;
/// A job stops waiting for a secret after its nodes have not asked for so long: they ask once a minute.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(120);
/// Upper bound on distinct lines a minute: as many as a person reads.
const LINES: usize = 256;
const MINUTE: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(crate) struct Withheld {
    waits: Mutex<HashMap<(SecretRef, JobUid), ConsentWait>>,
    logged: Mutex<HashMap<String, Instant>>,
}

#[derive(Clone, Debug)]
struct ConsentWait {
    name: String,
    asked: Instant,
}

impl Withheld {
    /// The job waits until the owners of these secrets have allowed it to use them.
    pub(crate) fn add_waits(&self, job: &JobUid, name: &str, secrets: &[SecretRef], now: Instant) {
        let mut waits = self.waits.lock();
        waits.retain(|_, wait| now < wait.asked + FORGOTTEN_AFTER);
        for secret in secrets {
            let key = (secret.clone(), job.clone());
            if waits.len() < WAITS || waits.contains_key(&key) {
                waits.insert(key, ConsentWait { name: name.to_owned(), asked: now });
            }
        }
    }

    /// Logs the problems with a user's secrets, each once a minute however many nodes need them. A NodeImage is a user for
    /// each node, so one of them stands for all with the same problem.
    pub(crate) fn log(&self, user: &str, details: &[String], now: Instant) {
        for detail in details {
            if self.is_due(detail, now) {
                warn!(user, detail, "a registry secret is of no use");
            }
        }
    }

    fn is_due(&self, line: &str, now: Instant) -> bool {
        let mut logged = self.logged.lock();
        logged.retain(|_, at| now < *at + MINUTE);
        let is_due = logged.len() < LINES && !logged.contains_key(line);
        if is_due {
            logged.insert(line.to_owned(), now);
        }
        is_due
    }

    /// The waits of now, by secret.
    pub(crate) fn by_secret(&self, now: Instant) -> HashMap<SecretRef, Vec<(JobUid, String)>> {
        let mut waits = self.waits.lock();
        waits.retain(|_, wait| now < wait.asked + FORGOTTEN_AFTER);
        let mut by_secret: HashMap<_, Vec<_>> = HashMap::new();
        for ((secret, job), wait) in &*waits {
            by_secret.entry(secret.clone()).or_default().push((job.clone(), wait.name.clone()));
        }
        by_secret
    }

    pub(crate) fn end_wait(&self, secret: &SecretRef, job: &JobUid) {
        let mut waits = self.waits.lock();
        waits.remove(&(secret.clone(), job.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_bounded_and_expire() {
        let (withheld, now) = (Withheld::default(), Instant::now());
        let secret = |n: usize| SecretRef::new("default", &format!("s{n}")).unwrap();
        let job = JobUid("u".to_owned());
        let all: Vec<_> = (0..WAITS + 10).map(secret).collect();
        withheld.add_waits(&job, "a", &all, now);
        assert_eq!(withheld.by_secret(now).len(), WAITS);
        let later = now + FORGOTTEN_AFTER / 2;
        withheld.add_waits(&job, "a", &all[..1], later);
        assert_eq!(withheld.by_secret(now + FORGOTTEN_AFTER).len(), 1, "only what was asked for again");
        withheld.end_wait(&all[0], &job);
        assert!(withheld.by_secret(later).is_empty());
    }

    #[test]
    fn all_nodes_share_a_line() {
        let (withheld, now) = (Withheld::default(), Instant::now());
        for node in 0..LINES {
            withheld.log(&format!("nodeimage/edge-{node}"), &["no entry".to_owned()], now);
        }
        assert_eq!(withheld.logged.lock().len(), 1);
    }

    #[test]
    fn log_lines_are_deduplicated_and_bounded() {
        let (withheld, now) = (Withheld::default(), Instant::now());
        assert!(withheld.is_due("a", now) && withheld.is_due("b", now));
        assert!(!withheld.is_due("a", now + MINUTE / 2) && !withheld.is_due("b", now));
        let due = (0..2 * LINES).filter(|n| withheld.is_due(&n.to_string(), now)).count();
        assert_eq!(due, LINES - 2);
        assert!(withheld.is_due("a", now + MINUTE));
    }
}
