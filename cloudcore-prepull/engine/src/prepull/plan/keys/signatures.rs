//! The public keys that the images of a job are verified with, from the Secrets that `spec.verify` names.

use std::collections::BTreeMap;

use prepull_api::credentials::SecretUser;
use prepull_api::download::{MAX_VERIFICATION_KEY, MAX_VERIFICATION_KEYS, Verification};
use prepull_api::overriders::SecretRef;
use prepull_api::wire::truncate_reason;

use super::{SecretLookup, SecretProblem, allowed_secret};
use crate::prepull::validate::VerifyPolicy;

/// The end of the names under which cosign and people keep public keys: `cosign.pub`.
const SUFFIX: &str = ".pub";
const BEGIN: &str = "-----BEGIN PUBLIC KEY-----";
const END: &str = "-----END PUBLIC KEY-----";

/// What the images of a job are verified with.
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedVerification {
    /// What a node is sent.
    pub verification: Verification,
    /// What is wrong with the secrets, in detail: for the log, and not for the status.
    pub details: Vec<String>,
    /// The secrets without their owners' consent.
    pub withheld: Vec<SecretRef>,
}

/// The public keys in the data of a Secret. Anything else, such as the private key beside it, stays where it is.
pub(super) fn public_keys(
    data: &BTreeMap<String, Vec<u8>>,
) -> BTreeMap<String, Result<String, &'static str>> {
    let keys = data.iter().filter(|(name, _)| name.ends_with(SUFFIX));
    keys.map(|(name, value)| (name.clone(), public_key(value))).collect()
}

fn public_key(value: &[u8]) -> Result<String, &'static str> {
    let text = str::from_utf8(value).unwrap_or_default().trim();
    if text.len() > MAX_VERIFICATION_KEY {
        Err("is longer than a public key")
    } else if text.starts_with(BEGIN) && text.ends_with(END) && text.matches("-----BEGIN ").count() == 1 {
        Ok(format!("{text}\n"))
    } else {
        Err("is not one public key as PEM, as cosign generate-key-pair writes it")
    }
}

/// Resolves the keys for the images of a job. Should one secret be of no use, no signature counts: an image that is signed
/// with its key would be called unsigned otherwise. `user`: who needs the consent of the secrets' owners.
pub fn resolve_verification(
    policy: &VerifyPolicy,
    user: Option<SecretUser<'_>>,
    lookup: impl Fn(&SecretRef) -> SecretLookup,
) -> ResolvedVerification {
    let mut keys: Vec<String> = Vec::new();
    let mut problems = Vec::new();
    for secret in &policy.keys {
        match usable_keys(secret, user, lookup(secret)) {
            Ok(found) => {
                for key in found {
                    if !keys.contains(&key) {
                        keys.push(key);
                    }
                }
            }
            Err(problem) => problems.push((secret, problem)),
        }
    }
    if keys.len() > MAX_VERIFICATION_KEYS {
        let text =
            format!("spec.verify.keys name {} keys; at most {MAX_VERIFICATION_KEYS} are used", keys.len());
        keys.truncate(MAX_VERIFICATION_KEYS);
        problems.extend(policy.keys.first().map(|secret| (secret, SecretProblem::for_everyone(text))));
    }
    let texts: Vec<_> = problems.iter().map(|(_, problem)| problem.text.as_str()).collect();
    let unavailable = (!texts.is_empty()).then(|| truncate_reason(&texts.join("; ")));
    let withheld = problems.iter().filter(|(_, problem)| problem.is_withheld);
    ResolvedVerification {
        verification: Verification { mode: policy.mode, keys, unavailable },
        withheld: withheld.map(|(secret, _)| (*secret).clone()).collect(),
        details: problems.into_iter().map(|(_, problem)| problem.detail).collect(),
    }
}

/// The public keys of one secret, never none; or why there are none.
fn usable_keys(
    secret: &SecretRef,
    user: Option<SecretUser<'_>>,
    found: SecretLookup,
) -> Result<Vec<String>, SecretProblem> {
    let found = allowed_secret(secret, user, found)?;
    if found.public_keys.is_empty() {
        let text =
            format!("secret {secret} has no key {{name}}{SUFFIX}: store the public key as cosign{SUFFIX}");
        return Err(SecretProblem::for_everyone(text));
    }
    let keys = found.public_keys.iter().map(|(name, key)| match key {
        Ok(key) => Ok(key.clone()),
        Err(problem) => Err(SecretProblem::for_everyone(format!("secret {secret}: {name} {problem}"))),
    });
    keys.collect()
}

#[cfg(test)]
mod tests {
    use prepull_api::credentials::ALLOW;
    use prepull_api::download::VerificationMode;

    use super::*;

    const KEY: &str = "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----";

    fn lookup(data: &[(&str, &str)], allow: &str) -> SecretLookup {
        let data = data.iter().map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec())).collect();
        SecretLookup::found("Opaque", &data, &[(ALLOW.to_owned(), allow.to_owned())].into())
    }

    fn resolve(names: &[&str], lookup: impl Fn(&str) -> SecretLookup) -> ResolvedVerification {
        let keys = names.iter().map(|name| SecretRef::new("keys", name).unwrap()).collect();
        let policy = VerifyPolicy { mode: VerificationMode::Enforce, keys };
        resolve_verification(&policy, Some(SecretUser::Job("release")), |secret| lookup(secret.name()))
    }

    #[test]
    fn each_public_key_is_sent_once() {
        let other = KEY.replace("AAAA", "BBBB");
        let resolved = resolve(&["one", "two"], |name| match name {
            "one" => lookup(&[("cosign.key", "PRIVATE"), ("cosign.pub", KEY), ("next.pub", &other)], "*"),
            _ => lookup(&[("again.pub", &format!("{KEY}\n"))], "release"),
        });
        let expected = [format!("{KEY}\n"), format!("{other}\n")];
        assert_eq!(
            (resolved.verification.keys, resolved.verification.unavailable),
            (expected.to_vec(), None)
        );
        assert!(resolved.details.is_empty() && resolved.withheld.is_empty());
    }

    /// A key of this many bytes.
    fn key_of(length: usize) -> String {
        KEY.replace("AAAA", &"A".repeat(length + 4 - KEY.len()))
    }

    #[test]
    fn keys_up_to_the_limits_are_used() {
        for more in [0, 1] {
            let lengths = MAX_VERIFICATION_KEY - MAX_VERIFICATION_KEYS - more + 1..=MAX_VERIFICATION_KEY;
            let keys: Vec<_> = lengths.map(|length| (format!("{length}.pub"), key_of(length))).collect();
            let keys: Vec<_> = keys.iter().map(|(name, key)| (name.as_str(), key.as_str())).collect();
            let Verification { keys, unavailable, .. } =
                resolve(&["all"], |_| lookup(&keys, "*")).verification;
            assert_eq!((keys.len(), unavailable.is_some()), (MAX_VERIFICATION_KEYS, more > 0));
        }
    }

    #[test]
    fn a_useless_secret_makes_verification_unavailable() {
        let private = "-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED SIGSTORE PRIVATE KEY-----";
        let two = format!("{KEY}\n{KEY}");
        for (found, why) in [
            (lookup(&[], "*"), "secret keys/bad has no key {name}.pub"),
            (lookup(&[("cosign.pub", private)], "*"), "secret keys/bad: cosign.pub is not one public key"),
            (lookup(&[("cosign.pub", &two)], "*"), "is not one public key"),
            (lookup(&[("cosign.pub", BEGIN)], "*"), "is not one public key"),
            (
                lookup(&[("cosign.pub", &key_of(MAX_VERIFICATION_KEY + 1))], "*"),
                "is longer than a public key",
            ),
        ] {
            let resolved = resolve(&["bad", "good"], |name| match name {
                "bad" => found.clone(),
                _ => lookup(&[("cosign.pub", KEY)], "*"),
            });
            let reason = resolved.verification.unavailable.unwrap();
            assert!(reason.contains(why) && !reason.contains("AAAA"), "{reason}");
            assert!(resolved.withheld.is_empty());
        }
    }

    #[test]
    fn withheld_and_missing_secrets_look_alike() {
        let [withheld, missing] =
            [lookup(&[("cosign.pub", KEY)], "other"), SecretLookup::Missing].map(|found| {
                let resolved = resolve(&["cosign"], |_| found.clone());
                assert_eq!(resolved.withheld.len(), 1);
                assert!(resolved.verification.keys.is_empty());
                resolved.verification.unavailable.unwrap()
            });
        assert_eq!(withheld, missing);
        assert!(withheld.contains("kubectl prepull allow keys/cosign release"), "{withheld}");
    }
}
