//! Signatures that the real cosign has made, beside images in a real registry, by the code with which the agent verifies
//! them.

use edgecore_prepull::images::puller::PullError;
use edgecore_prepull::images::verify::{Verdict, verify};
use prepull_api::download::{Verification, VerificationMode};
use prepull_api::failure::FailureCode;
use prepull_api::image::Reference;
use prepull_e2e::prelude::*;
use prepull_e2e::signing::{Form, Signer};
use prepull_registry::{RegistryClient, Settings};

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
