//! Differences between releases of containerd.

use std::path::PathBuf;

/// Major and minor number of a release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Release(u32, u32);

/// Directories for registries since 2.2, if the configuration has no `config_path`.
const DEFAULT_HOSTS: [&str; 2] = ["/etc/containerd/certs.d", "/etc/docker/certs.d"];

impl Release {
    /// Parses `1.6.20~ds1`, `v1.7.24` or `2.1.9+ds1`. A version without a number is a build of the newest source.
    pub(super) fn parse(version: &str) -> Self {
        let mut numbers = version.trim_start_matches('v').split('.').map(|number| number.parse().ok());
        match (numbers.next().flatten(), numbers.next().flatten()) {
            (Some(major), Some(minor)) => Self(major, minor),
            _ => Self(u32::MAX, 0),
        }
    }

    /// Whether it obeys `sync_fs` with this snapshotter. Since 2.0 it does for overlay and bind mounts.
    pub(super) fn flushes_layers(self, snapshotter: &str) -> bool {
        // Don't trust a build without a number to flush.
        (2..u32::MAX).contains(&self.0) && ["overlayfs", "native"].contains(&snapshotter)
    }

    /// Whether it ignores a hosts.toml that has no `host` table.
    pub(super) fn ignores_server_alone(self) -> bool {
        self < Self(2, 0)
    }

    /// The directories for registries if the configuration has none.
    pub(super) fn default_hosts(self) -> Vec<PathBuf> {
        if self < Self(2, 2) { Vec::new() } else { DEFAULT_HOSTS.map(PathBuf::from).to_vec() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_differ() {
        for (version, flushes, ignores, looks) in [
            ("1.6.20~ds1", false, true, false),
            ("v1.7.24", false, true, false),
            ("v2.0.0", true, false, false),
            ("2.1.9+ds1", true, false, false),
            ("v2.2.0-rc.1", true, false, true),
            ("v2.10.1", true, false, true),
            ("", false, false, true),
            ("devel", false, false, true),
        ] {
            let release = Release::parse(version);
            let found = (
                release.flushes_layers("overlayfs"),
                release.ignores_server_alone(),
                !release.default_hosts().is_empty(),
            );
            assert_eq!(found, (flushes, ignores, looks), "{version}");
        }
        assert!(Release::parse("2.1.9").flushes_layers("native"));
        assert!(!Release::parse("2.1.9").flushes_layers("devmapper"));
    }
}
