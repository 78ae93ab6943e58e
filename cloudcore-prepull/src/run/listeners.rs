//! The ports that edges connect to: the tunnel and the enrolment port, with the CA behind both.

use std::net::SocketAddr;
use std::path::Path;
use std::time::SystemTime;

use anyhow::Context;
use kube::Client;
use prepull_engine::fleet::event::FleetEvent;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, info, info_span};

use super::core::Core;
use super::rotation::{CaSource, RotationKeeper};
use crate::commands::args::RunArgs;
use crate::edges::PortTerms;
use crate::edges::enroll;
use crate::edges::pki::store::CaStore;
use crate::edges::pki::{CaSet, ServerIdentity};
use crate::edges::tokens::Tokens;
use crate::edges::tunnel::{self, listener};
use crate::kube_api::cluster;
use crate::kube_api::refusal::FailureLog;

/// Events of sessions that wait for the engine's queue. When it is full, the sessions wait.
const EVENTS: usize = 1024;

/// Both ports, open.
pub(super) struct Listeners {
    pub(super) tasks: JoinSet<()>,
    tunnel: SocketAddr,
    enroll: SocketAddr,
}

/// Opens both ports. `writes` is the leader's client. The tasks end when both have drained after `shutdown`.
pub(super) async fn start(
    args: &RunArgs,
    client: Client,
    writes: Client,
    core: &Core,
    shutdown: CancellationToken,
) -> anyhow::Result<Listeners> {
    let (vital, inputs) = (&core.vital, core.inputs.clone());
    let namespace = &args.cluster.namespace;
    let (cas, source) = if let (Some(cas), Some(certificates), Some(key)) =
        (read_ca_files(args)?, &args.ca_cert, &args.ca_key)
    {
        (cas, CaSource::Files { certificates: certificates.clone(), key: key.clone() })
    } else {
        let store = |client: &Client| Box::new(CaStore::new(client.clone(), namespace));
        let stored = store(&client).load_or_create_with_retry().await.with_context(|| {
            format!("read or create the CA, the Secret prepull-ca in the namespace {namespace}")
        })?;
        (stored.rotation.set, CaSource::Secret { read: store(&client), write: store(&writes) })
    };
    let clusters_cas = cluster::api_server_cas(args.cluster.kubeconfig.as_deref()).await?;
    cas.check_not_of(&clusters_cas)?;
    let identity = ServerIdentity::new(cas, &args.advertise).context("issue the server's certificate")?;
    tokio::spawn(
        vital.guard(
            "the renewal of the server's certificate",
            identity.clone().keep_renewed(shutdown.clone()),
        ),
    );

    let keeper = RotationKeeper {
        source,
        clusters_cas,
        identity: identity.clone(),
        sessions: core.sessions.clone(),
        metrics: core.metrics.edges(),
        writes,
        namespace: namespace.clone(),
        served_since: SystemTime::now(),
        old_life: args.edge_cert_ttl + args.renew_grace,
        log: FailureLog::default(),
    };
    let (begun, published) = keeper.publish_first().await;
    tokio::spawn(shutdown.clone().run_until_cancelled_owned(
        vital.guard("the rotation of the CA", keeper.keep_looking(begun, published)),
    ));

    let tunnel = listener::bind(args.tunnel_listen)
        .with_context(|| format!("listen on --tunnel-listen {}", args.tunnel_listen))?;
    let enrolment = TcpListener::bind(args.enroll_listen)
        .await
        .with_context(|| format!("listen on --enroll-listen {}", args.enroll_listen))?;
    let (tunnel_address, enroll_address) = (tunnel.local_addr()?, enrolment.local_addr()?);
    info!(address = %tunnel_address, "tunnel listens");
    info!(address = %enroll_address, "enrolment listens");

    let settings = enroll::EnrollSettings {
        certificate_ttl: args.edge_cert_ttl,
        accept_system_nodes: args.accept_system_nodes,
        renew_grace: args.renew_grace,
    };
    let (tokens, watch) = Tokens::with_watch(client, namespace);
    let watch = shutdown.clone().run_until_cancelled_owned(watch);
    tokio::spawn(
        vital.guard("the watch of join tokens", watch).instrument(info_span!("watch", kind = "Secret")),
    );
    let terms = PortTerms { identity, roster: core.roster.clone(), metrics: core.metrics.edges(), shutdown };
    let serving = enroll::serve(enrolment, terms.clone(), tokens, settings);
    let mut listeners = JoinSet::new();
    listeners.spawn(vital.guard("the enrolment port", serving).instrument(info_span!("enroll")));

    let (events, mut arriving) = mpsc::channel(EVENTS);
    let forwarding = async move {
        while let Some(event) = arriving.recv().await {
            if inputs.send(FleetEvent::Session(event).into()).await.is_err() {
                return;
            }
        }
    };
    tokio::spawn(vital.guard("the forwarding of the sessions' events", forwarding));
    let settings = tunnel::ListenerSettings {
        heartbeat: args.heartbeat,
        accept_system_nodes: args.accept_system_nodes,
        ..tunnel::ListenerSettings::default()
    };
    let serving = listener::serve(tunnel, terms, core.sessions.clone(), events, settings);
    listeners.spawn(vital.guard("the tunnel's listener", serving).instrument(info_span!("tunnel")));

    Ok(Listeners { tasks: listeners, tunnel: tunnel_address, enroll: enroll_address })
}

impl Listeners {
    /// Writes the addresses of all ports to `--ports-file`.
    pub(super) fn write_ports(&self, args: &RunArgs, health: SocketAddr) -> anyhow::Result<()> {
        let Some(file) = &args.ports_file else { return Ok(()) };
        let ports = json!({ "tunnel": self.tunnel, "enroll": self.enroll, "metrics": health });
        write_atomically(file, &ports.to_string())
            .with_context(|| format!("write --ports-file {}", file.display()))
    }
}

pub(super) fn read_ca_files(args: &RunArgs) -> anyhow::Result<Option<CaSet>> {
    let (Some(certificate), Some(key)) = (&args.ca_cert, &args.ca_key) else { return Ok(None) };
    CaSet::from_files(certificate, key).map(Some).context("read --ca-cert and --ca-key")
}

fn write_atomically(file: &Path, text: &str) -> std::io::Result<()> {
    let fresh = file.with_extension("new");
    std::fs::write(&fresh, text)?;
    std::fs::rename(&fresh, file)
}
