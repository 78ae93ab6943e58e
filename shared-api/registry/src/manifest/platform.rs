//! Platforms, and which images run on which, as containerd decides it (`platforms.Only`).

use serde::{Deserialize, Serialize};

/// An operating system and a processor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Platform {
    /// `linux`
    #[serde(default)]
    pub os: String,
    /// `amd64`, `arm64`, `arm`, as Go names them.
    #[serde(default)]
    pub architecture: String,
    /// `v8`, `v7`; empty where there is only one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub variant: String,
}

impl Platform {
    /// The platform that this program was built for, and so the node's. It has no variant for 32-bit ARM.
    pub fn of_this_machine() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            "x86" => "386",
            "powerpc64" => "ppc64le",
            "loongarch64" => "loong64",
            other => other,
        };
        Self {
            os: std::env::consts::OS.to_owned(),
            architecture: architecture.to_owned(),
            variant: String::new(),
        }
        .normalized()
    }

    /// With the names that Go uses, and without the variant that an architecture implies.
    fn normalized(&self) -> Self {
        let os = match self.os.to_lowercase().as_str() {
            "" => "linux".to_owned(),
            "macos" => "darwin".to_owned(),
            other => other.to_owned(),
        };
        let (architecture, variant) = (self.architecture.to_lowercase(), self.variant.to_lowercase());
        let (architecture, variant) = match (architecture.as_str(), variant.as_str()) {
            ("i386", _) => ("386", ""),
            ("x86_64" | "x86-64" | "amd64", "v1") => ("amd64", ""),
            ("x86_64" | "x86-64" | "amd64", variant) => ("amd64", variant),
            ("aarch64" | "arm64", "8" | "v8") => ("arm64", ""),
            ("aarch64" | "arm64", variant) => ("arm64", variant),
            ("armhf", _) | ("arm", "" | "7") => ("arm", "v7"),
            ("armel", _) | ("arm", "6") => ("arm", "v6"),
            ("arm", "5") => ("arm", "v5"),
            ("arm", "8") => ("arm", "v8"),
            (architecture, variant) => (architecture, variant),
        };
        Self { os, architecture: architecture.to_owned(), variant: variant.to_owned() }
    }

    /// How good an image for the offered platform is on this one: 0 is best, `None` does not run.
    pub(crate) fn rank(&self, offered: &Self) -> Option<usize> {
        let offered = offered.normalized();
        self.runnable_platforms().iter().position(|runs| *runs == offered)
    }

    /// What runs on this platform, the best one first.
    fn runnable_platforms(&self) -> Vec<Self> {
        let own = self.normalized();
        let with = |architecture: &str, variant: String| Self {
            os: own.os.clone(),
            architecture: architecture.to_owned(),
            variant,
        };
        let number: Option<u8> = own.variant.strip_prefix('v').and_then(|number| number.parse().ok());
        let mut all = vec![own.clone()];
        match own.architecture.as_str() {
            "amd64" => {
                let lower = (1..number.unwrap_or(1)).rev();
                all.extend(
                    lower.map(|n| with("amd64", if n == 1 { String::new() } else { format!("v{n}") })),
                );
                all.push(with("386", String::new()));
            }
            "arm" => all.extend((5..number.unwrap_or(7)).rev().map(|n| with("arm", format!("v{n}")))),
            "arm64" => {
                if !own.variant.is_empty() {
                    all.push(with("arm64", String::new()));
                }
                all.extend((5..=8).rev().map(|n| with("arm", format!("v{n}"))));
            }
            _ => {}
        }
        all
    }
}
