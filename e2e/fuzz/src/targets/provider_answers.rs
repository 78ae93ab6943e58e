//! Output of the kubelet's credential provider plugins.

use edgecore_prepull::images::providers::protocol::{PluginApiVersion, Response, decode_response};

use super::docker_configs;

pub(crate) fn run(input: &[u8]) {
    for version in PluginApiVersion::ALL {
        match decode_response(version, input) {
            Ok(Response { key_type: _, cache_for, logins }) => {
                docker_configs::check_credentials(&logins);
                // 292 years: the largest duration in Go, and so in the kubelet.
                assert!(
                    cache_for.is_none_or(|length| i64::try_from(length.as_nanos()).is_ok()),
                    "{cache_for:?}"
                );
            }
            Err(error) => assert!(error.len() < 200, "{error}"),
        }
    }
}
