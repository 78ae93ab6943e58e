//! The load balancer in front of the Service `cloudcore-prepull`, and the Service's own address: both forward edges to the
//! pod behind the Service.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Client;
use kube::api::{Api, ListParams};
use tokio::task::JoinHandle;

use crate::background;
use crate::cluster::{Cluster, NAMESPACE};
use crate::ground::{BALANCER, CLOUD_SERVICE, Ground};
use crate::network::Passage;

/// Ports of the Service, which its pods have too.
const PORTS: [u16; 2] = [10_000, 10_002];
/// Interval at which the endpoints are read.
const INTERVAL: Duration = Duration::from_millis(200);

/// Forwards as long as it lives.
pub(super) struct Balancer {
    task: JoinHandle<()>,
    #[expect(dead_code, reason = "held until the end")]
    passages: Vec<Passage>,
}

impl Balancer {
    pub(super) fn start(cluster: &Cluster, ground: &Ground) -> Result<Self> {
        let pod = Arc::new(Mutex::new(None));
        let addresses = [BALANCER, CLOUD_SERVICE].into_iter();
        let addresses = addresses.flat_map(|address| PORTS.map(|port| SocketAddr::from((address, port))));
        let passages = addresses.map(|address| {
            let pod = Arc::clone(&pod);
            let target = move || {
                let pod: Option<IpAddr> = *pod.lock().unwrap_or_else(PoisonError::into_inner);
                pod.map(|pod| SocketAddr::from((pod, address.port())))
            };
            let room = Some(ground.control());
            Passage::open_to_target((room, address), room, target, Duration::ZERO)
        });
        let passages = passages.collect::<Result<Vec<_>>>()?;
        let client = cluster.client();
        let task = background::runtime()?.spawn(async move {
            loop {
                // While the API server is away, the last pod is as good as any.
                if let Ok(found) = ready_endpoint(client.clone()).await {
                    *pod.lock().unwrap_or_else(PoisonError::into_inner) = found;
                }
                tokio::time::sleep(INTERVAL).await;
            }
        });
        Ok(Self { task, passages })
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Address of the first pod behind the Service that is ready.
async fn ready_endpoint(client: Client) -> Result<Option<IpAddr>> {
    let api: Api<EndpointSlice> = Api::namespaced(client, NAMESPACE);
    let selected = ListParams::default().labels("kubernetes.io/service-name=cloudcore-prepull");
    let slices = api.list(&selected).await?;
    let mut endpoints = slices.items.into_iter().flat_map(|slice| slice.endpoints.unwrap_or_default());
    let ready = endpoints.find(|endpoint| {
        endpoint.conditions.as_ref().is_none_or(|conditions| conditions.ready != Some(false))
    });
    Ok(ready.and_then(|endpoint| endpoint.addresses.first()?.parse().ok()))
}
