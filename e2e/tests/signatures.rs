//! Signatures that the real cosign has made, beside images in a real registry, by the code with which the agent verifies
//! them.

use edgecore_prepull::images::puller::PullError;
use edgecore_prepull::images::verify::{Verdict, verify};
use prepull_api::crd::status::ImagePrePullJobStatus;
use prepull_api::download::{Verification, VerificationMode};
use prepull_api::failure::FailureCode;
use prepull_api::image::Reference;
use prepull_e2e::prelude::*;
use prepull_e2e::signing::{Form, Signer};
use prepull_registry::{RegistryClient, Settings};
use serde_json::json;

/// Verifies an image of the registry by these keys.
async fn check(
    reference: &str,
    mode: VerificationMode,
    keys: &[&Signer],
) -> Result<Result<Verdict, PullError>> {
    let client = RegistryClient::new(Settings::default());
    let repository = client.repository(&Reference::parse(reference)?.normalized(), None)?;
    let image = repository.resolve().await?.descriptor;
    let keys = keys.iter().map(|key| key.public_key()).collect::<Result<_>>()?;
    Ok(verify(&repository, &image, &Verification { mode, keys, unavailable: None }).await)
}

/// Why an image is refused. With the mode Warn it is pulled, and the reason is the same.
async fn refusal(reference: &str, keys: &[&Signer]) -> Result<String> {
    let error = check(reference, VerificationMode::Enforce, keys).await?.err().context("not refused")?;
    ensure!(error.code == FailureCode::SignatureInvalid, "{error:?}");
    let warned = check(reference, VerificationMode::Warn, keys).await??;
    assert_eq!(warned, Verdict::Unsigned { reason: error.message.clone() });
    Ok(error.message)
}

#[tokio::test]
async fn an_image_counts_as_signed_by_its_own_signature_of_a_known_key_only() -> Result<()> {
    let registry = Registry::start().await?;
    let (ecdsa, ed25519, stranger) =
        (Signer::ecdsa().await?, Signer::ed25519().await?, Signer::ecdsa().await?);

    for (name, signer) in [("ecdsa", &ecdsa), ("ed25519", &ed25519)] {
        for (form, tag, suffix) in [(Form::Tag, "tag", ".sig"), (Form::Bundle, "bundle", "")] {
            let case = format!("{name} {tag}");
            let repository = format!("{name}/{tag}");
            let (image, next) = (Image::multi_arch("signed")?, Image::small("next")?);
            let signed = registry.seed(&image, &format!("{repository}:v1"))?;
            let unsigned = registry.seed(&next, &format!("{repository}:v2"))?;
            signer.sign(&registry, &repository, image.digest(), form).await?;

            let verdict = check(&signed, VerificationMode::Enforce, &[&stranger, signer]).await??;
            assert_eq!(verdict, Verdict::Signed, "{case}");
            let by_other = refusal(&signed, &[&stranger]).await?;
            assert!(by_other.contains("by none of the keys"), "{case}: {by_other}");
            let missing = refusal(&unsigned, &[signer]).await?;
            assert!(missing.contains("not signed") && missing.contains(next.digest()), "{case}: {missing}");

            // Whoever may write to the registry puts the signature of one image beside another.
            let place = |image: &Image| format!("{}{suffix}", image.digest().replace(':', "-"));
            registry.retag(&repository, &place(&image), &place(&next))?;
            let moved = refusal(&unsigned, &[signer]).await?;
            assert!(moved.contains(&format!("another image, {}", image.digest())), "{case}: {moved}");
        }
    }

    // A statement by the right key that is not the one that the image is signed.
    let image = Image::small("attested")?;
    let attested = registry.seed(&image, "attested/app:v1")?;
    ecdsa.attest(&registry, "attested/app", image.digest()).await?;
    let other = refusal(&attested, &[&ecdsa]).await?;
    assert!(other.contains("and not the image itself"), "{other}");
    ecdsa.sign(&registry, "attested/app", image.digest(), Form::Bundle).await?;
    assert_eq!(check(&attested, VerificationMode::Enforce, &[&ecdsa]).await??, Verdict::Signed);
    Ok(())
}

#[tokio::test]
async fn a_job_pulls_only_what_the_keys_in_its_secret_have_signed() -> Result<()> {
    let registry = Registry::start().await?;
    let cluster = Cluster::start().await?;
    let cloud = Cloud::start(&cluster).requires_consent().await?;
    let stage = Stage::around(cluster, cloud, &["edge-1"]).await?;
    let signer = Signer::ecdsa().await?;
    let (image, other) = (Image::small("signed")?, Image::small("unsigned")?);
    let signed = registry.seed(&image, "team/signed:v1")?;
    let unsigned = registry.seed(&other, "team/unsigned:v1")?;
    signer.sign(&registry, "team/signed", image.digest(), Form::Tag).await?;
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

    // Nobody has allowed the job to use the keys: nothing counts as signed.
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
    assert_eq!(registry.requests().blob_fetches().of("team/unsigned").len(), 0, "not one byte of it");

    let status = job("warned", "Warn").completes().await?;
    assert_eq!(image_of(&status, &signed)?, (Tristate::True, None, String::new()));
    let (there, code, reason) = image_of(&status, &unsigned)?;
    assert_eq!((there, code), (Tristate::True, None));
    ensure!(reason.contains("without a valid signature") && reason.contains("not signed"), "{reason}");
    Ok(())
}
