//! Facts about an image that travel unchanged: from the program that pulls it to its result, and to the status of the job.

use serde::{Deserialize, Serialize};

/// Facts about an image on a node. A text has at most [`crate::wire::MAX_NOTE`] bytes, and never contains a credential.
/// Each is absent if it doesn't apply, and from edges that don't report it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ImageFacts {
    /// Who has downloaded the image: the agent, or the container runtime. Absent if it was there already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pulled_by: Option<PulledBy>,
    /// Why the agent has left the download to the container runtime.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pulled_by_reason: String,
    /// The key that made a valid signature of the image: `sha256:` and the first 12 hexadecimal digits of the SHA-256 of its
    /// public key in DER (SubjectPublicKeyInfo). Absent if the image was there already, since then no signature is verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signed_by: Option<String>,
    /// Why the node got nothing from the neighbours of its site, although the job shares layers within sites.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub unshared_reason: String,
    /// Bytes of layers that the node didn't download, because it rebuilt them from an earlier image and deltas. The deltas
    /// themselves are subtracted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta_saved_bytes: Option<u64>,
    /// Why a layer was downloaded whole, although the registry has deltas to the image: Unlisted, Malformed, OtherSource,
    /// TooLarge, OldFiles, NoRoom, Undelivered, WrongLayer or NotUnpacked. Absent if a delta was used or there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_delta: Option<NoDelta>,
    /// The same as one sentence.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub no_delta_reason: String,
    /// Why the kubelet will ask the registry before pods may use the image, although it is on the node: OtherRepository,
    /// NoCredentials, SomeCredentials, Pulling or Unreadable, by the kubelet's records at the time of the pull. Absent if no
    /// reason was found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubelet_record: Option<KubeletRecord>,
    /// The same as one sentence.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kubelet_record_reason: String,
}

impl ImageFacts {
    /// All texts, for limits on their length.
    pub fn texts(&mut self) -> [&mut String; 4] {
        let Self {
            pulled_by: _,
            pulled_by_reason,
            // Its form is restricted instead.
            signed_by: _,
            unshared_reason,
            delta_saved_bytes: _,
            no_delta: _,
            no_delta_reason,
            kubelet_record: _,
            kubelet_record_reason,
        } = self;
        [pulled_by_reason, unshared_reason, no_delta_reason, kubelet_record_reason]
    }
}

impl From<PulledBy> for ImageFacts {
    fn from(by: PulledBy) -> Self {
        Self { pulled_by: Some(by), ..Self::default() }
    }
}

/// Who has downloaded an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
pub enum PulledBy {
    /// The agent. The container runtime has only unpacked it.
    Agent,
    /// The container runtime.
    #[default]
    Runtime,
    /// A program that only a newer version knows.
    #[serde(other)]
    Other,
}

impl PulledBy {
    /// The program as a label of metrics and an attribute of traces.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Runtime => "runtime",
            Self::Other => "other",
        }
    }
}

/// Why a layer was downloaded whole, although the registry has deltas to the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
pub enum NoDelta {
    /// The registry gave no list of deltas, or not the manifest of one.
    Unlisted,
    /// A delta has an invalid manifest.
    Malformed,
    /// None of them is from an image that is unpacked on the node.
    OtherSource,
    /// None of them is smaller than the layers.
    TooLarge,
    /// The agent can't read the files of the earlier image.
    OldFiles,
    /// The disk has room for the layers, and not for the tars that are rebuilt.
    NoRoom,
    /// The registry lists a delta, and doesn't give its bytes.
    Undelivered,
    /// The layer couldn't be rebuilt, or has another digest than that in the image.
    WrongLayer,
    /// The runtime couldn't unpack the image layer by layer, as it must unpack rebuilt ones.
    NotUnpacked,
    /// A reason that only a newer version knows.
    #[serde(other)]
    Other,
}

impl NoDelta {
    /// The reason as a label of metrics, spelled as in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unlisted => "Unlisted",
            Self::Malformed => "Malformed",
            Self::OtherSource => "OtherSource",
            Self::TooLarge => "TooLarge",
            Self::OldFiles => "OldFiles",
            Self::NoRoom => "NoRoom",
            Self::Undelivered => "Undelivered",
            Self::WrongLayer => "WrongLayer",
            Self::NotUnpacked => "NotUnpacked",
            Self::Other => "Other",
        }
    }
}

/// Why the kubelet will ask the registry before pods may use an image that is on the node, by its own records of pulls. By
/// its default policy (NeverVerifyPreloadedImages), it trusts an image only as long as it has no record of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "crd", derive(schemars::JsonSchema))]
pub enum KubeletRecord {
    /// It has pulled the same image from other repositories only.
    OtherRepository,
    /// Its record has no credentials at all: it was stopped while it pulled the image.
    NoCredentials,
    /// It has pulled the image from this repository, and lets only pods with the recorded secrets or ServiceAccounts use it.
    SomeCredentials,
    /// It has begun to pull the image, and hasn't ended.
    Pulling,
    /// It can't read its record.
    Unreadable,
    /// A reason that only a newer version knows.
    #[serde(other)]
    Other,
}
