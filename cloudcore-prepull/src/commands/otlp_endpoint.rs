//! The address of a collector.

use std::str::FromStr;
use std::time::Duration;

use anyhow::Context;
use hyper::Uri;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use opentelemetry_http::hyper::HyperClient;

/// The base address of an OpenTelemetry collector that takes OTLP over HTTP, such as `http://collector.observability:4318`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OtlpEndpoint(Uri);

impl FromStr for OtlpEndpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wanted = "write http://HOST:4318, the base address of OTLP over HTTP";
        let uri: Uri = text.parse().map_err(|error| format!("{error}; {wanted}"))?;
        let is_base = uri.host().is_some() && uri.query().is_none();
        match uri.scheme_str() {
            Some("http" | "https") if is_base => Ok(Self(uri)),
            _ => Err(wanted.to_owned()),
        }
    }
}

impl OtlpEndpoint {
    /// The address for traces, as the specification of OTLP makes it of the base address.
    pub(crate) fn traces_url(&self) -> String {
        format!("{}/v1/traces", self.0.to_string().trim_end_matches('/'))
    }

    pub(crate) fn client(
        &self,
        limit: Duration,
    ) -> anyhow::Result<HyperClient<HttpsConnector<HttpConnector>>> {
        let connector = HttpsConnectorBuilder::new();
        let connector = if self.0.scheme_str() == Some("https") {
            connector
                .with_provider_and_native_roots(rustls::crypto::ring::default_provider())
                .context("the CAs of the system cannot be read, for --otlp-endpoint")?
        } else {
            connector.with_tls_config(no_roots()?)
        };
        Ok(HyperClient::new(connector.https_or_http().enable_http1().build(), limit, None))
    }
}

/// For an address without TLS: an image may be without CAs.
fn no_roots() -> anyhow::Result<rustls::ClientConfig> {
    let provider = rustls::crypto::ring::default_provider().into();
    let config =
        rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(config.with_root_certificates(rustls::RootCertStore::empty()).with_no_client_auth())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn an_endpoint_is_a_base_address() {
        let cases = [
            ("http://collector:4318", "http://collector:4318/v1/traces"),
            ("http://collector:4318/", "http://collector:4318/v1/traces"),
            ("https://otlp.example/tenant", "https://otlp.example/tenant/v1/traces"),
        ];
        for (text, traces) in cases {
            let endpoint: OtlpEndpoint = text.parse().unwrap();
            assert_eq!(endpoint.traces_url(), traces);
            endpoint.client(Duration::from_secs(1)).unwrap();
        }
        for bad in ["", "collector:4318", "/v1/traces", "grpc://collector:4317", "http://c/?x=1"] {
            let error = bad.parse::<OtlpEndpoint>().unwrap_err();
            assert!(error.contains("write http://HOST:4318"), "{bad}: {error}");
        }
    }
}
