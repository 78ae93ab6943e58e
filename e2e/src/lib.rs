//! The harness of the end-to-end tests. A test describes its parts and events; the harness starts real programs, waits
//! for them, keeps their logs, and leaves nothing behind.
//!
//! ```text
//!  Place (temporary directory, logs, canary)      Reaper (outlives a killed test and cleans up after it)
//!    ├─ Cluster   etcd, kube-apiserver (RBAC on), CRDs, nodes, secrets ── Job, JobStatus
//!    │    └─ kruise: KruisePullJob, KruiseListJob, KruiseNodeImage, pods, the commands of the manual
//!    ├─ Kubernetes  a whole cluster: control plane, and machines with a kubelet and a containerd that run pods
//!    ├─ ApiProxy  between the cloud and kube-apiserver: refuses, delays, cuts, loses responses, ends watches
//!    ├─ Registry  docker-registry, users, TLS, access log ◀── Image (generated once, cached)
//!    ├─ Signer    cosign: key pairs, signatures of images in a Registry
//!    ├─ Proxy     in front of a registry or of the tunnel: cuts, delays, throttles, fails, records
//!    ├─ Cloud     cloudcore-prepull as its ServiceAccount, tokens, metrics
//!    ├─ Front     in front of several Clouds: forwards edges to the one that is ready, as a Service does
//!    ├─ EdgeNode  a containerd and an edgecore-prepull that has joined with a token
//!    ├─ Disk      ext4 or xfs under a containerd, with a power switch
//!    ├─ Person    kubectl prepull, with a user's rights (services: how the API server finds a Cloud)
//!    ├─ Helm      helm, for our chart
//!    ├─ Prometheus  a real one, with the alerts and queries of manifests/monitoring
//!    ├─ Machine   a systemd of its own, in namespaces, for what only an init shows
//!    ├─ Network   namespaces for the cloud and for edges, with cables that can be cut, one way or both
//!    ├─ Lan       namespaces for the boxes of a site at a switch, and its uplink with a rate and a counter
//!    ├─ EdgeWire  a link to one edge that delays and loses packets as real ones do
//!    ├─ Boxes     a site behind an uplink: a Lan, a cloud and a registry outside, an EdgeNode in each box
//!    ├─ Stage     cluster, cloud and edge nodes in one step
//!    ├─ Site      cluster, cloud and a registry behind a link that can be slowed and cut: for tests of faults
//!    ├─ Intruder  a client with a node's certificate that does not keep to the protocol
//!    ├─ Flood     connections by the thousand, without certificate and token
//!    └─ Fleet     simulated edges: the real tunnel, real certificates, pulls that only take time
//! ```
//!
//! Every part belongs to the [`place::Place`] of the test that started it. It's found by the name of the test's thread,
//! so we don't pass it around. Parts are stopped when they are dropped; if the test process dies without dropping them,
//! the [`reaper`] stops them.
//!
//! Environment variables: docs/testing.md lists them; e2e/setup/with-parts.sh sets `PREPULL_APISERVER_DIR`,
//! `PREPULL_BIN_DIR`, `PREPULL_E2E_LOGS` and `PREPULL_E2E_POOL`.

pub mod api_proxy;
mod background;
pub mod boxes;
pub mod browser;
pub mod certs;
pub mod chance;
#[cfg(test)]
mod circles;
pub mod cleanup;
pub mod cloud;
pub mod cluster;
pub mod disk;
pub mod flood;
pub mod front;
mod ground;
pub mod helm;
pub mod http_proxy;
pub mod images;
pub mod intruder;
pub mod jobs;
pub mod keep;
pub mod kruise;
pub mod kubernetes;
pub mod machine;
pub mod network;
pub mod node;
pub mod parts;
pub mod place;
pub mod plain_http;
pub mod plugin;
pub mod ports;
pub mod prometheus;
pub mod proxy;
pub mod reaper;
pub mod recording;
pub mod registry;
pub mod services;
pub mod signing;
pub mod sim;
pub mod site;
pub mod stage;
pub mod teller;
pub mod usage;

/// The names that most tests need.
pub mod prelude {
    pub use crate::api_proxy::{ApiProxy, Fault, Requests};
    pub use crate::boxes::{Boxes, Plan, Run};
    pub use crate::certs::Authority;
    pub use crate::chance::Chance;
    pub use crate::cleanup::{SOON, eventually};
    pub use crate::cloud::Cloud;
    pub use crate::cluster::Cluster;
    pub use crate::disk::Format;
    pub use crate::front::Front;
    pub use crate::http_proxy::HttpProxy;
    pub use crate::images::{Image, MIB};
    pub use crate::intruder::{Intruder, Wire, refusal};
    pub use crate::jobs::{Job, StatusExt, refused};
    pub use crate::kruise::{KruiseListJob, KruiseNodeImage, KruisePullJob, name_and_tag};
    pub use crate::kubernetes::{Kubernetes, Worker};
    pub use crate::network::{Cable, Lan, Network, Outlet, Uplink};
    pub use crate::node::{Containerd, EdgeNode};
    pub use crate::place::{CANARY, Place, password};
    pub use crate::plugin::Person;
    pub use crate::proxy::Proxy;
    pub use crate::registry::{Registry, TokenServer};
    pub use crate::sim::{Behaviour, Fleet, PullDurations};
    pub use crate::site::Site;
    pub use crate::stage::Stage;
    pub use anyhow::{Context, Result, bail, ensure};
    pub use prepull_api::crd::kruise::PullPhase;
    pub use prepull_api::crd::status::{JobPhase, NodePhase, Tristate};
}
