//! Signatures of the real cosign, beside images in a real registry, verified by the agent's code.

use std::collections::BTreeSet;

use edgecore_prepull::images::puller::PullError;
use edgecore_prepull::images::verify::{SignatureVerdict, verify};
use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_api::download::{Verification, VerificationMode};
use prepull_api::failure::FailureCode;
use prepull_api::image::Reference;
use prepull_e2e::plugin::Person;
use prepull_e2e::ports::Port;
use prepull_e2e::prelude::*;
use prepull_e2e::proxy::ProxiedRequest;
use prepull_e2e::signing::{SignatureForm, Signer};
use prepull_registry::{ClientSettings, HostsFiles, RegistryClient};
use serde_json::json;

/// Verifies an image of the registry by these keys.
async fn check(
    reference: &str,
    mode: VerificationMode,
    keys: &[&Signer],
) -> Result<Result<SignatureVerdict, PullError>> {
    check_by(RegistryClient::new(ClientSettings::default()), reference, mode, keys).await
}

async fn check_by(
    client: RegistryClient,
    reference: &str,
    mode: VerificationMode,
    keys: &[&Signer],
) -> Result<Result<SignatureVerdict, PullError>> {
    let repository = client.repository(&Reference::parse(reference)?.normalized(), None)?;
    let image = repository.resolve().await?.descriptor;
    let keys = keys.iter().map(|key| key.public_key()).collect::<Result<_>>()?;
    Ok(verify(&repository, &image, &Verification { mode, keys, unavailable: None }).await)
}

/// The reason for refusing an image. With the mode Warn it's pulled, and the reason is the same.
async fn refusal(reference: &str, keys: &[&Signer]) -> Result<String> {
    let error = check(reference, VerificationMode::Enforce, keys).await?.err().context("not refused")?;
    ensure!(error.code == FailureCode::SignatureInvalid, "{error:?}");
    let warned = check(reference, VerificationMode::Warn, keys).await??;
    assert_eq!(warned, SignatureVerdict::Unsigned { reason: error.message.clone() });
    Ok(error.message)
}

#[tokio::test]
async fn only_a_known_keys_signature_counts() -> Result<()> {
    let registry = Registry::start().await?;
    let (ecdsa, ed25519, stranger) =
        (Signer::ecdsa().await?, Signer::ed25519().await?, Signer::ecdsa().await?);

    for (name, signer) in [("ecdsa", &ecdsa), ("ed25519", &ed25519)] {
        for (form, tag, suffix) in
            [(SignatureForm::Tag, "tag", ".sig"), (SignatureForm::Bundle, "bundle", "")]
        {
            let case = format!("{name} {tag}");
            let repository = format!("{name}/{tag}");
            let (image, next) = (Image::multi_arch("signed")?, Image::small("next")?);
            let signed = registry.seed(&image, &format!("{repository}:v1"))?;
            let unsigned = registry.seed(&next, &format!("{repository}:v2"))?;
            signer.sign(&registry, &repository, image.digest(), form).await?;

            let verdict = check(&signed, VerificationMode::Enforce, &[&stranger, signer]).await??;
            assert_eq!(verdict, SignatureVerdict::Signed { by: signer.fingerprint().await? }, "{case}");
            let by_other = refusal(&signed, &[&stranger]).await?;
            assert!(by_other.contains("by none of the keys"), "{case}: {by_other}");
            let missing = refusal(&unsigned, &[signer]).await?;
            assert!(missing.contains("not signed") && missing.contains(next.digest()), "{case}: {missing}");

            // An attacker with write access puts the signature of one image beside another.
            let place = |image: &Image| format!("{}{suffix}", image.digest().replace(':', "-"));
            registry.retag(&repository, &place(&image), &place(&next))?;
            let moved = refusal(&unsigned, &[signer]).await?;
            assert!(moved.contains(&format!("another image, {}", image.digest())), "{case}: {moved}");
        }
    }

    // A statement by the right key that isn't a signature of the image.
    let image = Image::small("attested")?;
    let attested = registry.seed(&image, "attested/app:v1")?;
    ecdsa.attest(&registry, "attested/app", image.digest()).await?;
    let other = refusal(&attested, &[&ecdsa]).await?;
    assert!(other.contains("and not the image itself"), "{other}");
    ecdsa.sign(&registry, "attested/app", image.digest(), SignatureForm::Bundle).await?;
    assert_eq!(
        check(&attested, VerificationMode::Enforce, &[&ecdsa]).await??,
        SignatureVerdict::Signed { by: ecdsa.fingerprint().await? }
    );
    Ok(())
}

/// Storage and discovery of signatures.
const LAYOUTS: [(&str, SignatureForm, bool); 3] = [
    ("cosign 2: a tag", SignatureForm::Tag, false),
    ("cosign 3: the tag of the referrers", SignatureForm::Bundle, false),
    ("cosign 3: the referrers API", SignatureForm::Bundle, true),
];

#[tokio::test]
async fn signatures_are_found_behind_mirrors() -> Result<()> {
    let (mirror, origin) =
        tokio::try_join!(Registry::start().into_future(), Registry::start().into_future())?;
    let (signer, nowhere) = (Signer::ecdsa().await?, Port::reserve()?);
    let hosts = HostsFiles { dirs: vec![Place::here()?.registry_hosts()], ignores_server_alone: false };
    let client = || RegistryClient::new(ClientSettings { hosts: hosts.clone(), ..ClientSettings::default() });
    for (number, (layout, form, by_api)) in LAYOUTS.into_iter().enumerate() {
        let (at_mirror, at_origin) = (Proxy::for_http(mirror.addr())?, Proxy::for_http(origin.addr())?);
        if by_api {
            at_mirror.list_referrers();
            at_origin.list_referrers();
        }
        for (where_signed, signed) in [
            ("both", [true, true]),
            ("mirror", [true, false]),
            ("origin", [false, true]),
            ("none", [false, false]),
        ] {
            let repository = format!("{where_signed}/layout-{number}");
            let image = Image::small(where_signed)?;
            let path = format!("{repository}:v1");
            mirror.seed(&image, &path)?;
            let reference = origin.seed(&image, &path)?;
            for (registry, _) in [&mirror, &origin].into_iter().zip(signed).filter(|(_, signed)| *signed) {
                signer.sign(registry, &repository, image.digest(), form).await?;
            }
            let verify = async || check_by(client(), &reference, VerificationMode::Enforce, &[&signer]).await;

            let before = at_origin.records().len();
            origin.route_by_mirror(at_mirror.addr(), at_origin.addr())?;
            match (verify().await?, signed) {
                (Ok(SignatureVerdict::Signed { .. }), [true, _] | [_, true]) => {}
                (Err(error), [false, false]) if error.code == FailureCode::SignatureInvalid => {}
                (other, _) => bail!("{layout}, signed at {where_signed}: {other:?}"),
            }
            let asked_origin = at_origin.records().len() - before;
            ensure!(!signed[0] || asked_origin == 0, "{layout}: the origin was asked in vain");

            // In an air-gapped site only the mirror can be reached.
            origin.route_by_mirror(at_mirror.addr(), nowhere.addr())?;
            match (verify().await?, signed) {
                (Ok(SignatureVerdict::Signed { .. }), [true, _]) => {}
                // The origin may have one, so we don't know that it's unsigned.
                (Err(error), [false, _]) if error.code == FailureCode::Unreachable => {}
                (other, _) => bail!("{layout}, signed at {where_signed}, air-gapped: {other:?}"),
            }
            // Mirrors that are away hide nothing.
            let dead = Port::reserve()?;
            origin.route_by_mirrors(&[nowhere.addr(), dead.addr()], at_origin.addr())?;
            match (verify().await?, signed) {
                (Ok(SignatureVerdict::Signed { .. }), [_, true]) => {}
                (Err(error), [_, false]) if error.code == FailureCode::Unreachable => {}
                (other, _) => bail!("{layout}, signed at {where_signed}, without mirrors: {other:?}"),
            }
            origin.route_by_mirror(at_mirror.addr(), at_origin.addr())?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn a_referrer_in_trouble_hides_no_other() -> Result<()> {
    let registry = Registry::start().await?;
    let link = Proxy::for_http(registry.addr())?;
    link.list_referrers();
    registry.route_through(&link)?;
    let hosts = HostsFiles { dirs: vec![Place::here()?.registry_hosts()], ignores_server_alone: false };
    let client = || RegistryClient::new(ClientSettings { hosts: hosts.clone(), ..ClientSettings::default() });
    let [signer, other, stranger] = [Signer::ecdsa().await?, Signer::ecdsa().await?, Signer::ecdsa().await?];
    let image = Image::small("troubled")?;
    let reference = registry.seed(&image, "team/troubled:v1")?;
    for signer in [&other, &signer] {
        signer.sign(&registry, "team/troubled", image.digest(), SignatureForm::Bundle).await?;
    }
    // The search ends with the first valid one, and the registry lists them in the order of their digests.
    let unknown = check_by(client(), &reference, VerificationMode::Enforce, &[&stranger]).await?;
    ensure!(unknown.is_err(), "{unknown:?}");
    let manifests =
        |record: &ProxiedRequest| record.path.contains("/manifests/sha256:").then(|| record.path.clone());
    let read: BTreeSet<String> =
        link.records().iter().filter_map(manifests).filter(|path| !path.ends_with(image.digest())).collect();
    ensure!(read.len() == 2, "two signatures are looked at: {read:?}");

    let verify = async || check_by(client(), &reference, VerificationMode::Enforce, &[&signer]).await;
    assert_eq!(verify().await??, SignatureVerdict::Signed { by: signer.fingerprint().await? });
    let mut outcomes = Vec::new();
    for path in &read {
        link.fail_next_on(path, 1000, 503);
        outcomes.push(verify().await?);
        link.stop_failing();
    }
    // An unreadable signature doesn't make another one invalid; if none is valid, it might have been.
    outcomes.sort_by_key(Result::is_ok);
    ensure!(
        matches!(&outcomes[..], [Err(error), Ok(SignatureVerdict::Signed { .. })] if error.code == FailureCode::RegistryError),
        "{outcomes:?}"
    );
    Ok(())
}

#[tokio::test]
async fn a_job_pulls_only_signed_images() -> Result<()> {
    let registry = Registry::start().await?;
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).requires_consent().await?;
    let stage = Stage::from_parts(cluster, cloud, &["edge-1"]).await?;
    let signer = Signer::ecdsa().await?;
    let (image, other) = (Image::small("signed")?, Image::small("unsigned")?);
    let signed = registry.seed(&image, "team/signed:v1")?;
    let unsigned = registry.seed(&other, "team/unsigned:v1")?;
    signer.sign(&registry, "team/signed", image.digest(), SignatureForm::Tag).await?;
    let key = signer.public_key()?;
    stage.cluster.secret("keys", "cosign", "Opaque", &[("cosign.pub", key.as_bytes())]).await?;
    let job = |name: &str, mode: &str| {
        let verify = json!({"keys": [{"secretRef": "keys/cosign"}], "mode": mode});
        let job = stage.cluster.job(name).on(["edge-1"]).images([&signed, &unsigned]).policy("Always");
        // A field of the wrong type would not be deserialised.
        job.spec(|spec| spec.verify = serde_json::from_value(verify).ok())
    };
    let image_of = |status: &ImagePrePullJobStatus, image: &str| {
        let image = status.image("edge-1", image).context("no such image")?;
        anyhow::Ok((image.status, image.code, image.reason.clone()))
    };

    // The job has no consent to use the keys: nothing counts as signed.
    let status = job("not-allowed", "Enforce").timeout_seconds(5).fails().await?;
    assert_eq!(status.summary.failure + status.summary.unknown, 1);
    ensure!(!stage.edge("edge-1")?.has_image(&signed).await?, "pulled without the keys");

    stage.cluster.annotate_secret("keys", "cosign", "prepull.kubeedge.io/allow", Some("*")).await?;
    let status = job("enforced", "Enforce").fails().await?;
    assert_eq!(image_of(&status, &signed)?, (Tristate::True, None, String::new()));
    let (there, code, reason) = image_of(&status, &unsigned)?;
    assert_eq!((there, code), (Tristate::False, Some(FailureCode::SignatureInvalid)));
    ensure!(reason.contains("not signed"), "{reason}");
    ensure!(!stage.edge("edge-1")?.has_image(&unsigned).await?, "it is there");
    assert_eq!(
        registry.requests().blob_fetches().for_repository("team/unsigned").len(),
        0,
        "not one byte of it"
    );

    let status = job("warned", "Warn").completes().await?;
    assert_eq!(image_of(&status, &signed)?, (Tristate::True, None, String::new()));
    let (there, code, reason) = image_of(&status, &unsigned)?;
    assert_eq!((there, code), (Tristate::True, None));
    ensure!(reason.contains("without a valid signature") && reason.contains("not signed"), "{reason}");

    // Which key it was: in the status, and for a person.
    let by = signer.fingerprint().await?;
    let signed_by =
        |image: &str| status.image("edge-1", image).and_then(|image| image.facts.signed_by.clone());
    assert_eq!((signed_by(&signed), signed_by(&unsigned)), (Some(by.clone()), None));
    let person = Person::new(stage.cluster.kubeconfig());
    let said = person.runs("verify warned").await?.is(0, &["SIGNED BY"])?;
    let line_of = |image: &str| said.out.lines().find(|line| line.ends_with(image)).unwrap_or_default();
    ensure!(line_of(&signed).starts_with(&format!("{by} ")), "{}", said.out);
    ensure!(line_of(&unsigned).starts_with("- "), "{}", said.out);
    Ok(())
}
