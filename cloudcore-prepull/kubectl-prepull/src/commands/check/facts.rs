//! The facts that `check` reads of the cluster. Without the right to read one, we keep the reason instead.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context;
use futures::TryStreamExt;
use http::Request;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Service};
use k8s_openapi::api::discovery::v1::Endpoint;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, ListParams};
use kube::client::Body;
use prepull_api::crd::GROUP;
use prepull_api::crd::kruise::CONTROLLER_LEASE;
use prepull_api::edges::{EdgeList, EdgeQuery};
use prepull_api::kubeedge;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::cluster::Cluster;
use crate::edges::{DOOR, pages};
use crate::problem::{self, MissingRight};
use crate::rights::{Right, missing_rights};

const PODS: &str = "app.kubernetes.io/name=cloudcore-prepull";
const CA: &str = "prepull-ca";
const KRUISE: &str = "imagepulljobs.apps.kruise.io";
/// If an edge's certificate ends earlier than this, it was not renewed: edges renew with a third of its life left, ten
/// days of thirty.
const RENEWED: SignedDuration = SignedDuration::from_hours(3 * 24);

/// What was read, or why it could not be. None: there is no such object.
pub(super) type FactResult<T> = Result<T, String>;

pub(super) struct ClusterFacts {
    pub(super) server: String,
    pub(super) version: String,
    /// How far the API server's clock is ahead of this one.
    pub(super) clock: Option<SignedDuration>,
    pub(super) namespace: String,
    /// Whether jobs are served at all.
    pub(super) served: FactResult<bool>,
    pub(super) jobs: FactResult<Option<CustomResourceDefinition>>,
    pub(super) reports: FactResult<Option<CustomResourceDefinition>>,
    pub(super) settings: FactResult<Option<CustomResourceDefinition>>,
    pub(super) missing: FactResult<Vec<&'static Right>>,
    pub(super) lease: FactResult<Option<Lease>>,
    pub(super) pods: FactResult<Vec<Pod>>,
    /// The pods, or addresses where they have none, that the Service leads to.
    pub(super) door: FactResult<Option<BTreeSet<String>>>,
    /// The CA's certificates as PEM.
    pub(super) ca: FactResult<Option<String>>,
    pub(super) cloudcore: FactResult<Option<ConfigMap>>,
    pub(super) manager: FactResult<Option<Deployment>>,
    pub(super) kruise: FactResult<Option<CustomResourceDefinition>>,
    pub(super) kruise_lease: FactResult<Option<Lease>>,
    pub(super) edges: FactResult<EdgeCounts>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct EdgeCounts {
    pub(super) total: usize,
    pub(super) connected: usize,
    /// Connected edges by version; `None` for those that don't report theirs.
    pub(super) versions: BTreeMap<Option<String>, usize>,
    /// Connected edges with a certificate that ends soon.
    pub(super) ending: Vec<String>,
    pub(super) revoked: usize,
}

impl EdgeCounts {
    pub(super) fn add(&mut self, page: &EdgeList, now: Timestamp) {
        (self.total, self.connected) = (page.total, page.connected);
        for edge in &page.items {
            self.revoked += usize::from(edge.revoked);
            if !edge.connected {
                continue;
            }
            *self.versions.entry(edge.version.clone()).or_default() += 1;
            let until = edge.certificate_until.as_ref();
            if until.is_some_and(|until| until.0.duration_since(now) < RENEWED) {
                self.ending.push(edge.name.to_string());
            }
        }
    }
}

/// Reads everything. Fails if the API server cannot be asked at all.
pub(super) async fn read(cluster: &Cluster) -> anyhow::Result<ClusterFacts> {
    let version = cluster
        .client()
        .apiserver_version()
        .await
        .context("the API server cannot be asked for its version")?;
    let said = |error: anyhow::Error| match problem::server_answer(&error).and_then(MissingRight::from_answer)
    {
        Some(right) => format!("{right}; manifests/kubectl-prepull/checker.yaml has the role"),
        None => problem::error_text(&problem::explain(error, cluster.place())),
    };
    let place = FactReader { cluster, said: &said };
    let namespace = Some(cluster.system_namespace());
    let job = format!("imageprepulljobs.{GROUP}");
    let report = format!("imageprepullreports.{GROUP}");
    let settings = format!("imageprepullsettings.{GROUP}");
    let (clock, served, jobs, reports, settings, missing, lease, pods, service, led_to) = futures::join!(
        clock_offset(cluster),
        serves_jobs(cluster),
        place.get(None, &job),
        place.get(None, &report),
        place.get(None, &settings),
        missing_rights(cluster),
        place.get::<Lease>(namespace, DOOR),
        list_pods(cluster),
        place.get::<Service>(namespace, DOOR),
        led_to(cluster),
    );
    let (kubeedge, kruise) = (Some(kubeedge::NAMESPACE), Some(CONTROLLER_LEASE.0));
    let (ca, cloudcore, manager, kruise, kruise_lease, edges) = futures::join!(
        place.get::<ConfigMap>(namespace, CA),
        place.get(kubeedge, kubeedge::CLOUDCORE.0),
        place.get(kubeedge, kubeedge::CONTROLLER_MANAGER),
        place.get(None, KRUISE),
        place.get(kruise, CONTROLLER_LEASE.1),
        count_edges(cluster),
    );
    let door = match service {
        Ok(Some(_)) => led_to.map(Some).map_err(said),
        Ok(None) => Ok(None),
        Err(error) => Err(error),
    };
    let ca = ca.map(|map| map.and_then(|map| map.data?.remove("ca.crt")));
    Ok(ClusterFacts {
        server: cluster.place().server.clone(),
        version: version.git_version,
        clock,
        namespace: cluster.system_namespace().to_owned(),
        served: served.map_err(said),
        jobs,
        reports,
        settings,
        missing: missing.map_err(said),
        lease,
        pods: pods.map_err(said),
        door,
        ca,
        cloudcore,
        manager,
        kruise,
        kruise_lease,
        edges: edges.map_err(said),
    })
}

struct FactReader<'a, S> {
    cluster: &'a Cluster,
    said: &'a S,
}

impl<S: Fn(anyhow::Error) -> String> FactReader<'_, S> {
    async fn get<K>(&self, namespace: Option<&str>, name: &str) -> FactResult<Option<K>>
    where
        K: k8s_openapi::Metadata<Ty = k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta>
            + Clone
            + std::fmt::Debug
            + DeserializeOwned,
    {
        let path = match namespace {
            Some(namespace) => format!("namespaces/{namespace}/{}/{name}", K::URL_PATH_SEGMENT),
            None => format!("{}/{name}", K::URL_PATH_SEGMENT),
        };
        let group = if K::GROUP.is_empty() { "/api".to_owned() } else { format!("/apis/{}", K::GROUP) };
        let request = Request::get(format!("{group}/{}/{path}", K::VERSION)).body(Vec::new());
        let request = request.map_err(|error| error.to_string())?;
        match self.cluster.client().request(request).await {
            Ok(object) => Ok(Some(object)),
            Err(kube::Error::Api(answer)) if answer.code == 404 => Ok(None),
            Err(error) => Err((self.said)(error.into())),
        }
    }
}

async fn list_pods(cluster: &Cluster) -> anyhow::Result<Vec<Pod>> {
    let pods: Api<Pod> = Api::namespaced(cluster.client(), cluster.system_namespace());
    Ok(pods.list(&ListParams::default().labels(PODS).limit(100)).await?.items)
}

/// The EndpointSlices of a Service, as far as they say where it leads. Not the typed object, which is of one version.
#[derive(Debug, Deserialize)]
pub(super) struct Slices {
    items: Vec<Slice>,
}

#[derive(Debug, Deserialize)]
struct Slice {
    endpoints: Option<Vec<Endpoint>>,
}

impl Slices {
    /// Each pod once: with two families of addresses it is in two slices.
    pub(super) fn ready_pods(self) -> BTreeSet<String> {
        let endpoints = self.items.into_iter().flat_map(|slice| slice.endpoints.unwrap_or_default());
        // Where readiness is not known, it is to be taken as given.
        let ready = endpoints.filter(|endpoint| {
            endpoint.conditions.as_ref().and_then(|conditions| conditions.ready).unwrap_or(true)
        });
        ready
            .filter_map(|mut endpoint| {
                endpoint.target_ref.and_then(|pod| pod.name).or_else(|| endpoint.addresses.pop())
            })
            .collect()
    }
}

/// What the Service leads to. Kubernetes 1.20 has the EndpointSlices under their version of before alone; Endpoints, which all
/// have, are deprecated from 1.33 on, and the API server warns of each look at them.
async fn led_to(cluster: &Cluster) -> anyhow::Result<BTreeSet<String>> {
    let namespace = cluster.system_namespace();
    let slices = async |version: &str| {
        let of_service = format!("endpointslices?labelSelector=kubernetes.io/service-name%3D{DOOR}");
        let path = format!("/apis/discovery.k8s.io/{version}/namespaces/{namespace}/{of_service}");
        let request = Request::get(path).body(Vec::new())?;
        anyhow::Ok(cluster.client().request::<Slices>(request).await?)
    };
    let listed = match slices("v1").await {
        Err(error) if problem::server_answer(&error).is_some_and(|answer| answer.code == 404) => {
            slices("v1beta1").await
        }
        listed => listed,
    };
    Ok(listed?.ready_pods())
}

/// Whether the API server serves jobs. Everybody may ask that.
async fn serves_jobs(cluster: &Cluster) -> anyhow::Result<bool> {
    match cluster.client().list_api_group_resources(&format!("{GROUP}/v1alpha2")).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(answer)) if answer.code == 404 => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// How far the clock of the API server is ahead of this one, to a second or so: it puts its time into each answer.
async fn clock_offset(cluster: &Cluster) -> Option<SignedDuration> {
    let before = Timestamp::now();
    let request = Request::get("/version").body(Body::empty()).ok()?;
    let answer = cluster.client().send(request).await.ok()?;
    let date = answer.headers().get(http::header::DATE)?.to_str().ok()?;
    let there = jiff::fmt::rfc2822::parse(date).ok()?.timestamp();
    let took = Timestamp::now().duration_since(before);
    Some(there.duration_since(before + took / 2))
}

async fn count_edges(cluster: &Cluster) -> anyhow::Result<EdgeCounts> {
    let now = Timestamp::now();
    let mut pages = std::pin::pin!(pages(cluster, EdgeQuery::default()));
    let mut edges = EdgeCounts::default();
    while let Some(page) = pages.try_next().await? {
        edges.add(&page, now);
    }
    Ok(edges)
}
