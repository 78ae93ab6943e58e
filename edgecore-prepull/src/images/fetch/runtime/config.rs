//! The configuration that containerd's CRI reports. Since 2.0 it has nothing about registries.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::Registries;

/// A part of the configuration that CRI reports.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct CriConfig {
    containerd_root_dir: Option<PathBuf>,
    containerd: Option<CriContainerd>,
    /// Image of the containers that hold the namespaces of pods, before 2.0.
    pub(super) sandbox_image: Option<String>,
    registry: Option<CriRegistry>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct CriContainerd {
    snapshotter: String,
    discard_unpacked_layers: bool,
}

type Map = serde_json::Map<String, serde_json::Value>;

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct CriRegistry {
    config_path: String,
    mirrors: Option<Map>,
    configs: Option<Map>,
    auths: Option<Map>,
}

impl CriConfig {
    /// containerd's directory.
    pub(super) fn root(&self) -> Option<&Path> {
        self.containerd_root_dir.as_deref()
    }

    /// The name of the snapshotter, before 2.0.
    pub(super) fn snapshotter(&self) -> Option<&str> {
        Some(&*self.containerd.as_ref()?.snapshotter)
    }

    /// Settings of registries. `None` since 2.0.
    pub(super) fn registries(&self) -> Option<Registries> {
        let CriRegistry { config_path, mirrors, configs, auths } = self.registry.as_ref()?;
        Some(Registries {
            config_path: Some(config_path.clone()),
            has_old_settings: [mirrors, configs, auths].into_iter().flatten().any(|map| !map.is_empty()),
            discards_layers: self.containerd.as_ref().is_some_and(|config| config.discard_unpacked_layers),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn containerd_1_reports_its_registries() {
        let parse = |json: &str| serde_json::from_str::<CriConfig>(json).unwrap();
        let one = parse(
            r#"{"containerd":{"snapshotter":"overlayfs","discardUnpackedLayers":true},
            "registry":{"configPath":"/a","mirrors":null,"configs":{}},"containerdRootDir":"/r"}"#,
        );
        let config_path = Some("/a".to_owned());
        let expected = Registries { config_path, has_old_settings: false, discards_layers: true };
        assert_eq!(one.registries(), Some(expected));
        assert_eq!((one.root(), one.snapshotter()), (Some(Path::new("/r")), Some("overlayfs")));
        for old in ["mirrors", "configs", "auths"] {
            let config = parse(&format!(r#"{{"registry":{{"configPath":"/a","{old}":{{"r.io":{{}}}}}}}}"#));
            assert!(config.registries().unwrap().has_old_settings, "{old}");
        }
        let two = parse(r#"{"containerd":{"runtimes":{}},"containerdRootDir":"/r"}"#);
        assert_eq!(two.registries(), None);
    }
}
