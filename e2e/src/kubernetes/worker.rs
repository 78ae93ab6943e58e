//! Workers: machines of a whole cluster, each with a containerd and a kubelet that runs pods.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::Client;
use kube::api::Api;
use serde_json::{Value, json};

use super::ground::{Ground, Plot};
use crate::cleanup::{Child, SOON, eventually};
use crate::cluster::Cluster;
use crate::machine;
use crate::network::{Passage, Space};
use crate::node::{Containerd, inside};
use crate::parts;
use crate::place::Place;
use crate::registry::Registry;

/// The end of the memory of a machine's directories, as the machine sees them.
const KUBELET: &str = "var/lib/kubelet";
/// Network of the pods, by CNI's own plugins.
const CNI: &str = "etc/cni/net.d";

/// A machine that runs pods. Nothing on it outlives this value.
pub struct Worker {
    place: Arc<Place>,
    name: String,
    /// What the machine keeps on disk.
    dir: PathBuf,
    space: Space,
    address: Ipv4Addr,
    nodes: Api<Node>,
    /// Ends before the machine, whose end it would take for a crash.
    kubelet: Option<Child>,
    containerd: Containerd,
    machine: Child,
    init: u32,
    /// Its kubelet's configuration.
    settings: Value,
    passages: Vec<Passage>,
}

impl Worker {
    /// Starts a machine, and waits until its Node is Ready. `sandbox` is the image of the containers that hold a pod's
    /// namespaces; the registries are those that it reaches.
    pub(super) async fn start(
        cluster: &Cluster,
        ground: &Ground,
        name: &str,
        sandbox: &str,
        registries: &[&Registry],
        settings: &Value,
    ) -> Result<Self> {
        let place = Place::here()?;
        let dir = place.new_dir(name)?;
        let Plot { space, address, pods } = ground.plot().await?;
        let (machine, init, group) = boot(&place, name, &space, &dir).await?;
        let network = json!({
            "cniVersion": "0.4.0", "name": "pods",
            "plugins": [{
                "type": "bridge", "bridge": "pods", "isGateway": true,
                "ipam": {"type": "host-local", "dataDir": "/run/cni", "ranges": [[{"subnet": pods}]],
                         "routes": [{"dst": "0.0.0.0/0"}]},
            }],
        });
        std::fs::write(dir.join(CNI).join("10-pods.conflist"), network.to_string())?;
        let passages = registries.iter().map(|registry| reach(&space, registry)).collect::<Result<_>>()?;
        let (run, etc) = (dir.join("run/containerd"), dir.join("etc/containerd"));
        let containerd = Containerd::start_in_machine(name, init, run, &etc, sandbox).await?;
        // Before a pod needs it: its registry may be off by then.
        containerd.pull(sandbox, None).await?;

        let user = format!("system:node:{name}");
        let kubeconfig =
            cluster.kubeconfig_for(&user, Some("system:nodes"), &super::ground::CONTROL.to_string())?;
        std::fs::write(dir.join(KUBELET).join("kubeconfig"), kubeconfig)?;
        let mut worker = Self {
            place,
            name: name.to_owned(),
            dir,
            space,
            address,
            nodes: Api::all(Client::clone(&cluster.client())),
            kubelet: None,
            containerd,
            machine,
            init,
            settings: kubelet_settings(&group),
            passages,
        };
        worker.restart_kubelet(settings).await?;
        Ok(worker)
    }

    /// Name of the Node.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Address of the machine.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Container runtime of the machine.
    pub fn containerd(&self) -> &Containerd {
        &self.containerd
    }

    /// A path of the machine, as the test sees it. Only what is kept on disk is there: the directories of containerd, of
    /// the kubelet and of the agent.
    pub fn path(&self, path: &str) -> PathBuf {
        self.dir.join(path.trim_start_matches('/'))
    }

    /// Lets the machine reach a registry, under the address that it has for the test.
    pub fn reaches(&mut self, registry: &Registry) -> Result<()> {
        self.passages.push(reach(&self.space, registry)?);
        Ok(())
    }

    /// Runs a program on the machine, and returns its output.
    pub async fn run(&self, line: &[&str]) -> Result<String> {
        let (program, arguments) = line.split_first().context("an empty line")?;
        let mut command = Command::new(program);
        command.args(arguments);
        parts::output(inside(self.init, &command)).await
    }

    /// Kills the kubelet; pods go on. Nothing tells the API server.
    pub fn kill_kubelet(&mut self) -> Result<()> {
        self.kubelet.take().map_or(Ok(()), |mut kubelet| kubelet.kill9())
    }

    /// Starts the kubelet again with these settings in addition to those that it had, and waits until the Node says that it's
    /// Ready.
    pub async fn restart_kubelet(&mut self, settings: &Value) -> Result<()> {
        self.kill_kubelet()?;
        let before = self.heartbeat().await?;
        for (name, value) in settings.as_object().context("settings are an object")? {
            self.settings[name] = value.clone();
        }
        std::fs::write(self.path(KUBELET).join("config.json"), self.settings.to_string())?;
        let mut command = Command::new(parts::kubernetes("kubelet")?);
        command.args(["--config=/var/lib/kubelet/config.json", "--kubeconfig=/var/lib/kubelet/kubeconfig"]);
        command.args(["--hostname-override", &self.name, "--node-ip", &self.address.to_string()]);
        let log = format!("kubelet-{}", self.name);
        self.kubelet = Some(Child::spawn(&self.place, &log, inside(self.init, &command))?);
        let what = format!("{} is Ready", self.name);
        let ready = eventually(&what, SOON, async || {
            let beat = self.heartbeat().await?;
            ensure!(beat.is_some() && beat != before, "its condition: {beat:?}");
            Ok(())
        });
        if let Err(error) = ready.await {
            self.kubelet.as_mut().map_or(Ok(()), Child::check_running)?;
            return Err(error.context(self.place.log_tails(&[&log])));
        }
        Ok(())
    }

    /// When the kubelet last said that it's ready.
    async fn heartbeat(&self) -> Result<Option<String>> {
        let node = self.nodes.get_opt(&self.name).await?;
        let conditions = node.and_then(|node| node.status).and_then(|status| status.conditions);
        let mut conditions = conditions.into_iter().flatten();
        let ready = conditions.find(|condition| condition.type_ == "Ready" && condition.status == "True");
        Ok(ready.and_then(|ready| ready.last_heartbeat_time).map(|time| time.0.to_string()))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.kill_kubelet();
        let _ = self.containerd.kill9();
        machine::end(&mut self.machine);
    }
}

/// Boots a machine. Returns the process that holds it, its first process, and its control group.
async fn boot(place: &Place, name: &str, space: &Space, dir: &Path) -> Result<(Child, u32, String)> {
    let mut command = Command::new("bash");
    command.arg(parts::setup_dir().join("kubelet-machine.sh")).arg(name).arg(space.name()).arg(dir);
    command.arg(parts::kubernetes("kubelet")?.parent().context("no directory")?);
    command.args(parts::containerd_dir());
    let mut machine = Child::spawn(place, &format!("machine-{name}"), command)?;
    let up = dir.join("run/kubernetes/up");
    let booted = eventually("the machine is up", SOON, async || Ok(std::fs::read_to_string(&up)?)).await;
    let group = match booted {
        Ok(group) => group.trim().to_owned(),
        Err(error) => {
            machine.check_running()?;
            return Err(error.context(machine.log()));
        }
    };
    let pid = machine.pid();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    let init = children.split_whitespace().next().context("the machine has no process 1")?.parse()?;
    Ok((machine, init, group))
}

fn reach(space: &Space, registry: &Registry) -> Result<Passage> {
    Passage::through(Some(space), None, registry.addr())
}

/// What every kubelet here needs: a control group and DNS of its own, and no opinion on how full this machine's disk is.
fn kubelet_settings(group: &str) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs", "cgroupRoot": format!("/{group}"), "failCgroupV1": false,
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "failSwapOn": false, "imageGCHighThresholdPercent": 100,
        "makeIPTablesUtilChains": false, "readOnlyPort": 0, "resolvConf": "",
    })
}
