#![allow(clippy::unwrap_used)]

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, Ed25519KeyPair};
use serde_json::json;

use super::bundle::{Bundle, SIGNED};
use super::keys::SignerKeys;
use super::{Flaw, simple};

/// Made by cosign 2.5.0 and 3.1.1, with their own key pair and with an imported one of OpenSSL.
const ECDSA: &str = "-----BEGIN PUBLIC KEY-----
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE57K22xZcQ+RGpa+ey352FOzog7tL
6AWVQ3sqyqOWXUnorjfWsgebSZqum8ZeYpEun38WoGCuVupzFpf4p8Ggsw==
-----END PUBLIC KEY-----
";
const ED25519: &str = "-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEAspbhwcld6nU3lgKKO3sloXyN+S2DDGpAYq39B4Dc2DI=
-----END PUBLIC KEY-----
";
/// By `openssl pkey -pubin -outform DER | sha256sum`.
const ECDSA_PRINT: &str = "sha256:90d49bb14a4a";
const ED25519_PRINT: &str = "sha256:2d27c1d90954";
const OF_TAG: &str = "sha256:c1f1ba709fbaf926c4442244f030cb793ba4dde09a452c02c303db1b954426a5";
const DOCUMENT: &str = r#"{"critical":{"identity":{"docker-reference":"127.0.0.1:5599/a/one"},"image":{"docker-manifest-digest":"sha256:c1f1ba709fbaf926c4442244f030cb793ba4dde09a452c02c303db1b954426a5"},"type":"cosign container image signature"},"optional":null}"#;
const BY_ECDSA: &str =
    "MEUCIEYKAiIeVOgBODBO079Hi9Ug//QKOXjALE2tibthaQ94AiEA160vGCQmTVR8TkMagATJHMDQmhd9VAkk1kzyZpRypjg=";
const BY_ED25519: &str =
    "H8Aji9tCNhMbPUR8uHGojQiuVy2NGPSAeqULrVGbUoQ4ImGbOYZ6iM6beZfXQ/jW1U9xlAdvpwbxtAe5zlsxAA==";
const OF_BUNDLE: &str = "sha256:cbd2a92f241c201a70c8811fdd5ced32cb88ee7979c80dd13aecc7e9e37d6775";
const PAYLOAD: &str = "eyJfdHlwZSI6Imh0dHBzOi8vaW4tdG90by5pby9TdGF0ZW1lbnQvdjEiLCJzdWJqZWN0IjpbeyJkaWdlc3QiOnsic2hhMjU2IjoiY2JkMmE5MmYyNDFjMjAxYTcwYzg4MTFmZGQ1Y2VkMzJjYjg4ZWU3OTc5YzgwZGQxM2FlY2M3ZTllMzdkNjc3NSJ9LCJhbm5vdGF0aW9ucyI6e319XSwicHJlZGljYXRlVHlwZSI6Imh0dHBzOi8vc2lnc3RvcmUuZGV2L2Nvc2lnbi9zaWduL3YxIiwicHJlZGljYXRlIjp7fX0=";
const BUNDLE_BY_ECDSA: &str =
    "MEUCIQCRctFhgYlpmsFn7pG1qQ/ZeSPTbli7Ak2MP7XOZyPw8wIgGLV6dj/6W4gXNFPDqeZ6rFCBgh7UOx2G/IrN3rY+hXs=";
const BUNDLE_BY_ED25519: &str =
    "1UksPWY8E2fgSlDkmZv7tyqiEO7EepjFbjNQpfxxRJHs9CUuDnd88DovNvdbjw+s9wb13rpD/UOasQGSTvttBA==";

fn keys(texts: &[&str]) -> SignerKeys {
    SignerKeys::parse(&texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>()).unwrap()
}

type Sign = Box<dyn Fn(&[u8]) -> Vec<u8>>;

/// A key pair of this test: its public key in PEM, and its signing function.
struct Pair {
    pem: String,
    sign: Sign,
}

fn pem(der: &[u8]) -> String {
    format!("-----BEGIN PUBLIC KEY-----\n{}\n-----END PUBLIC KEY-----\n", STANDARD.encode(der))
}

fn pairs() -> [Pair; 2] {
    let random = SystemRandom::new();
    let ecdsa = rcgen::KeyPair::generate().unwrap();
    let ecdsa_pem = ecdsa.public_key_pem();
    let pkcs8 = ecdsa.serialize_der();
    let ecdsa = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &pkcs8, &random).unwrap();
    let ed25519 = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    let ed25519_pem = ed25519.public_key_pem();
    let ed25519 = Ed25519KeyPair::from_pkcs8_maybe_unchecked(&ed25519.serialize_der()).unwrap();
    [
        Pair { pem: ecdsa_pem, sign: Box::new(move |m| ecdsa.sign(&random, m).unwrap().as_ref().to_vec()) },
        Pair { pem: ed25519_pem, sign: Box::new(move |m| ed25519.sign(m).as_ref().to_vec()) },
    ]
}

fn envelope(payload: &[u8], kind: &str, sign: &dyn Fn(&[u8]) -> Vec<u8>) -> serde_json::Value {
    let mut message = format!("DSSEv1 {} {kind} {} ", kind.len(), payload.len()).into_bytes();
    message.extend_from_slice(payload);
    let signature = STANDARD.encode(sign(&message));
    json!({"payload": STANDARD.encode(payload), "payloadType": kind, "signatures": [{"sig": signature}]})
}

fn bundle(content: &serde_json::Value) -> Result<Bundle, Flaw> {
    let mut whole = json!({"verificationMaterial": {"publicKey": {"hint": "x"}}});
    for (field, value) in content.as_object().unwrap() {
        whole[field] = value.clone();
    }
    Bundle::parse(whole.to_string().as_bytes())
}

fn statement(digest: &str, predicate: &str) -> Vec<u8> {
    let (algorithm, hex) = digest.split_once(':').unwrap();
    let subject = json!([{"digest": {algorithm: hex}}]);
    let kind = "https://in-toto.io/Statement/v1";
    json!({"_type": kind, "subject": subject, "predicateType": predicate, "predicate": {}}).to_string().into()
}

#[test]
fn a_signature_is_for_key_and_image() {
    for (key, print, signature) in [(ECDSA, ECDSA_PRINT, BY_ECDSA), (ED25519, ED25519_PRINT, BY_ED25519)] {
        let by_key = Ok(print.to_owned());
        let document = DOCUMENT.as_bytes();
        assert_eq!(simple::check(OF_TAG, document, signature, &keys(&[key])), by_key);
        assert_eq!(simple::check(OF_TAG, document, signature, &keys(&[ED25519, ECDSA])), by_key);
        let moved = simple::check(OF_BUNDLE, document, signature, &keys(&[key]));
        assert_eq!(moved, Err(Flaw::OtherImage(OF_TAG.to_owned())));
        let other = if key == ECDSA { ED25519 } else { ECDSA };
        assert_eq!(simple::check(OF_TAG, document, signature, &keys(&[other])), Err(Flaw::OtherKey));
        let edited = DOCUMENT.replace("5599", "5598");
        assert_eq!(simple::check(OF_TAG, edited.as_bytes(), signature, &keys(&[key])), Err(Flaw::OtherKey));
    }
    for (key, print, signature) in
        [(ECDSA, ECDSA_PRINT, BUNDLE_BY_ECDSA), (ED25519, ED25519_PRINT, BUNDLE_BY_ED25519)]
    {
        let kind = "application/vnd.in-toto+json";
        let envelope = json!({"payload": PAYLOAD, "payloadType": kind, "signatures": [{"sig": signature}]});
        let bundle = bundle(&json!({"dsseEnvelope": envelope})).unwrap();
        assert_eq!(bundle.check(OF_BUNDLE, None, &keys(&[ED25519, ECDSA])), Ok(print.to_owned()));
        assert_eq!(bundle.check(OF_TAG, None, &keys(&[key])), Err(Flaw::OtherImage(OF_BUNDLE.to_owned())));
        let other = if key == ECDSA { ED25519 } else { ECDSA };
        assert_eq!(bundle.check(OF_BUNDLE, None, &keys(&[other])), Err(Flaw::OtherKey));
    }
}

#[test]
fn the_payload_must_state_a_signature() {
    let kind = "application/vnd.in-toto+json";
    for Pair { pem, sign } in pairs() {
        let keys = keys(&[&pem]);
        let check = |payload: &[u8], kind: &str| {
            bundle(&json!({"dsseEnvelope": envelope(payload, kind, &sign)}))
                .unwrap()
                .check(OF_TAG, None, &keys)
        };
        assert!(check(&statement(OF_TAG, SIGNED), kind).is_ok());
        let sbom = "https://spdx.dev/Document";
        assert_eq!(check(&statement(OF_TAG, sbom), kind), Err(Flaw::OtherStatement(sbom.to_owned())));
        let text = Err(Flaw::OtherStatement("text/plain".to_owned()));
        assert_eq!(check(&statement(OF_TAG, SIGNED), "text/plain"), text);
        assert!(matches!(check(b"{}", kind), Err(Flaw::Malformed(_))));
        assert!(matches!(check(b"", kind), Err(Flaw::Malformed(_))));
        let nothing =
            json!({"_type": "https://in-toto.io/Statement/v1", "subject": [], "predicateType": SIGNED});
        assert_eq!(check(nothing.to_string().as_bytes(), kind), Err(Flaw::OtherImage(String::new())));
        // The same hexadecimal digits under another algorithm are another image.
        let hex = OF_TAG.strip_prefix("sha256:").unwrap();
        assert!(matches!(
            check(&statement(&format!("sha512:{hex}"), SIGNED), kind),
            Err(Flaw::OtherImage(_))
        ));
        // Two subjects with one name each: readers of the first and of the last see the same.
        let twice = format!(
            r#"{{"_type":"https://in-toto.io/Statement/v1","predicateType":"{SIGNED}","subject":[],"subject":[]}}"#
        );
        assert!(matches!(check(twice.as_bytes(), kind), Err(Flaw::Malformed(_))));
        // A document of the other format, signed by the key with another type.
        let signature = STANDARD.encode(sign(DOCUMENT.as_bytes()));
        let envelope = json!({"payload": STANDARD.encode(DOCUMENT), "payloadType": kind, "signatures": [{"sig": signature}]});
        let confused = bundle(&json!({"dsseEnvelope": envelope})).unwrap().check(OF_TAG, None, &keys);
        assert_eq!(confused, Err(Flaw::OtherKey));

        let other_kind = DOCUMENT.replace("cosign container image signature", "something else");
        let signature = STANDARD.encode(sign(other_kind.as_bytes()));
        let flaw = simple::check(OF_TAG, other_kind.as_bytes(), &signature, &keys).unwrap_err();
        assert_eq!(flaw, Flaw::OtherStatement("something else".to_owned()));
        let signature = STANDARD.encode(sign(b"[]"));
        assert!(matches!(simple::check(OF_TAG, b"[]", &signature, &keys), Err(Flaw::Malformed(_))));
    }
}

#[test]
fn a_signature_of_the_manifest_counts() {
    let manifest = b"{\"schemaVersion\":2}";
    for Pair { pem, sign } in pairs() {
        let keys = keys(&[&pem]);
        let signed =
            |content: &[u8]| json!({"messageSignature": {"signature": STANDARD.encode(sign(content))}});
        let right = bundle(&signed(manifest)).unwrap();
        assert!(right.needs_manifest());
        assert!(right.check(OF_TAG, Some(manifest), &keys).is_ok());
        assert_eq!(right.check(OF_TAG, Some(b"another"), &keys), Err(Flaw::OtherKey));
        assert!(matches!(right.check(OF_TAG, None, &keys), Err(Flaw::Malformed(_))));
        // Both together are ambiguous, so the bundle is rejected.
        let mut both = signed(manifest);
        both["dsseEnvelope"] = envelope(&statement(OF_TAG, SIGNED), "application/vnd.in-toto+json", &sign);
        assert!(matches!(
            bundle(&both).unwrap().check(OF_TAG, Some(manifest), &keys),
            Err(Flaw::Malformed(_))
        ));
    }
}

#[test]
fn malformed_signatures_have_their_reasons() {
    let [Pair { pem, sign }, _] = pairs();
    let foreign = keys(&[ED25519]);
    let kind = "application/vnd.in-toto+json";
    let content = json!({
        "dsseEnvelope": envelope(&statement(OF_TAG, SIGNED), kind, &sign),
        "verificationMaterial": {"certificate": {"rawBytes": "…"}},
    });
    assert_eq!(bundle(&content).unwrap().check(OF_TAG, None, &foreign), Err(Flaw::Keyless));
    let keys = keys(&[&pem]);
    for (signature, expected) in [
        ("%%%", Flaw::Malformed("not base64".to_owned())),
        ("", Flaw::OtherKey),
        ("AAAA", Flaw::OtherKey),
        (&"A".repeat(5000), Flaw::TooLarge(5000)),
    ] {
        assert_eq!(simple::check(OF_TAG, DOCUMENT.as_bytes(), signature, &keys), Err(expected));
    }
    for content in ["", "[]", "{}", "{\"verificationMaterial\":{},\"verificationMaterial\":{}}"] {
        assert!(matches!(Bundle::parse(content.as_bytes()), Err(Flaw::Malformed(_))), "{content}");
    }
}

#[test]
fn the_most_informative_flaw_is_reported() {
    let ordered = [
        Flaw::Malformed("x".to_owned()),
        Flaw::TooLarge(1),
        Flaw::Keyless,
        Flaw::OtherKey,
        Flaw::OtherStatement("x".to_owned()),
        Flaw::OtherImage("x".to_owned()),
    ];
    assert!(ordered.is_sorted());
}

#[test]
fn an_unusable_key_is_named() {
    let p384 = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap().public_key_pem();
    let garbage = pem(b"garbage");
    let trailing = {
        let mut der = STANDARD.decode(ED25519.lines().nth(1).unwrap()).unwrap();
        der.push(0);
        pem(&der)
    };
    let many = ECDSA.repeat(17);
    let private = rcgen::KeyPair::generate().unwrap().serialize_pem();
    for (texts, expected) in [
        (vec![], "there is no key"),
        (vec![""], "key 1 of 1 for signatures has no PUBLIC KEY"),
        (vec![ECDSA, "hello"], "key 2 of 2 for signatures has no PUBLIC KEY"),
        (vec![&private], "has no PUBLIC KEY"),
        (vec![&p384], "neither ECDSA on P-256 nor Ed25519"),
        (vec![&garbage], "malformed"),
        (vec![&trailing], "malformed"),
        (vec!["-----BEGIN PUBLIC KEY-----\n%\n-----END PUBLIC KEY-----\n"], "malformed PEM"),
        (vec![&many], "more than the 16th"),
    ] {
        let texts: Vec<String> = texts.into_iter().map(str::to_owned).collect();
        let reason = SignerKeys::parse(&texts).err().unwrap();
        assert!(reason.contains(expected), "{reason} {expected}");
    }
    let both = format!("{ECDSA}{ED25519}");
    let (document, signature) = (DOCUMENT.as_bytes(), STANDARD.decode(BY_ED25519).unwrap());
    assert_eq!(keys(&[&both]).signer(document, &signature), Some(ED25519_PRINT));
}
