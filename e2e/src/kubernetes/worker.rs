//! Workers: machines of a whole cluster, each with a containerd and a kubelet that runs pods.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use kube::Client;
use kube::api::Api;
use rustix::fs::FallocateFlags;
use serde_json::{Value, json};

use crate::cleanup::{Child, SOON, eventually};
use crate::cluster::Cluster;
use crate::ground::{Ground, Plot};
use crate::machine;
use crate::network::{Passage, Space};
use crate::node::{Containerd, Paths, command_inside};
use crate::parts;
use crate::place::Place;
use crate::registry::Registry;

/// Directories of a machine, below its persistent directory.
const KUBELET: &str = "var/lib/kubelet";
const IMAGES: &str = "var/lib/containerd";
/// Network of the pods, by CNI's own plugins.
const CNI: &str = "etc/cni/net.d";

/// Differences from the usual machine.
#[derive(Clone, Copy, Debug)]
pub(super) enum WorkerKind {
    Plain,
    /// Its images are on a separate disk of this many bytes.
    OwnDisk(u64),
    /// Its containerd has the paths of k3s.
    K3s,
}

/// A machine that runs pods. Nothing on it outlives this value.
pub struct Worker {
    place: Arc<Place>,
    name: String,
    /// Persistent files of the machine.
    dir: PathBuf,
    space: Space,
    address: Ipv4Addr,
    client: Client,
    /// Must end before the machine, or it would report a crash.
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
    /// namespaces; like other images, it comes from the registry.
    pub(super) async fn start(
        cluster: &Cluster,
        ground: &Ground,
        name: &str,
        sandbox: &str,
        registry: &Registry,
        kind: WorkerKind,
    ) -> Result<Self> {
        let place = Place::here()?;
        let dir = place.new_dir(name)?;
        if let WorkerKind::OwnDisk(size) = kind {
            mount_disk(&dir, size).await?;
        }
        let paths = if matches!(kind, WorkerKind::K3s) { Paths::K3S } else { Paths::USUAL };
        let Plot { space, address, pods } = ground.plot().await?;
        let (machine, init, group) = boot(&place, name, &space, &dir, &paths).await?;
        let network = json!({
            "cniVersion": "0.4.0", "name": "pods",
            "plugins": [{
                "type": "bridge", "bridge": "pods", "isGateway": true,
                "ipam": {"type": "host-local", "dataDir": "/run/cni", "ranges": [[{"subnet": pods}]],
                         "routes": [{"dst": "0.0.0.0/0"}]},
            }],
        });
        std::fs::write(dir.join(CNI).join("10-pods.conflist"), network.to_string())?;
        let passages = vec![Passage::between_spaces(Some(&space), None, registry.addr())?];
        let containerd = Containerd::start_in_machine(name, init, &dir, &paths, sandbox).await?;
        // Before a pod needs it: by then its registry may be off.
        containerd.pull(sandbox, None).await?;

        let user = format!("system:node:{name}");
        let kubeconfig =
            cluster.kubeconfig_for(&user, Some("system:nodes"), &crate::ground::CONTROL.to_string())?;
        std::fs::write(dir.join(KUBELET).join("kubeconfig"), kubeconfig)?;
        let mut worker = Self {
            place,
            name: name.to_owned(),
            dir,
            space,
            address,
            client: cluster.client(),
            kubelet: None,
            containerd,
            machine,
            init,
            settings: kubelet_settings(&group, &paths),
            passages,
        };
        worker.restart_kubelet(&json!({})).await?;
        Ok(worker)
    }

    /// Container runtime of the machine.
    pub fn containerd(&self) -> &Containerd {
        &self.containerd
    }

    /// The same, to restart it.
    pub fn containerd_mut(&mut self) -> &mut Containerd {
        &mut self.containerd
    }

    /// A path of the machine, as seen by the test. Only persistent files are there: the directories of containerd, of
    /// the kubelet and of the agent, the CAs that the machine trusts, and `/etc/credential-providers`.
    pub fn path(&self, path: &str) -> PathBuf {
        self.dir.join(path.trim_start_matches('/'))
    }

    /// Free bytes on the disk that images are on.
    pub fn free_space(&self) -> Result<u64> {
        Ok(self.disk_space()?.0)
    }

    /// Free bytes, and all bytes, of the disk that images are on.
    pub fn disk_space(&self) -> Result<(u64, u64)> {
        let stat = rustix::fs::statvfs(self.dir.join(IMAGES))?;
        Ok((stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize))
    }

    /// Fills that disk with other files, once, until this many bytes are free.
    pub fn fill_disk(&self, free: u64) -> Result<()> {
        let taken = self.free_space()?.checked_sub(free).context("the disk is fuller than that")?;
        let ballast = File::create_new(self.dir.join(IMAGES).join("ballast"))?;
        Ok(rustix::fs::fallocate(ballast, FallocateFlags::empty(), 0, taken)?)
    }

    /// Lets the machine reach a registry, under the address that it has for the test.
    pub fn reaches(&mut self, registry: &Registry) -> Result<()> {
        self.reaches_at(registry.addr())
    }

    /// Lets the machine reach a server of the test, under the same address.
    pub fn reaches_at(&mut self, addr: SocketAddr) -> Result<()> {
        self.passages.push(Passage::between_spaces(Some(&self.space), None, addr)?);
        Ok(())
    }

    /// Lets the machine reach a registry at an address that isn't one of loopback. Returns it.
    pub fn reaches_nearby(&mut self, registry: &Registry) -> Result<SocketAddr> {
        let near = SocketAddr::from((self.address, registry.addr().port()));
        let (from, to) = ((Some(&self.space), near), (None, registry.addr()));
        self.passages.push(Passage::open(from, to, Duration::ZERO)?);
        Ok(near)
    }

    /// Kills the kubelet; pods continue. The API server gets no message.
    pub fn kill_kubelet(&mut self) -> Result<()> {
        self.kubelet.take().map_or(Ok(()), |mut kubelet| kubelet.kill9())
    }

    /// Restarts the kubelet with these settings in addition to its previous ones, and waits until the Node is Ready.
    pub async fn restart_kubelet(&mut self, settings: &Value) -> Result<()> {
        self.kill_kubelet()?;
        let before = self.heartbeat().await?;
        for (name, value) in settings.as_object().context("settings are an object")? {
            self.settings[name] = value.clone();
        }
        std::fs::write(self.path(KUBELET).join("config.json"), self.settings.to_string())?;
        let mut command = Command::new(parts::kubernetes_program("kubelet")?);
        command.args(["--config=/var/lib/kubelet/config.json", "--kubeconfig=/var/lib/kubelet/kubeconfig"]);
        command.args(["--hostname-override", &self.name, "--node-ip", &self.address.to_string()]);
        let log = format!("kubelet-{}", self.name);
        self.kubelet = Some(Child::spawn(&self.place, &log, command_inside(self.init, &command))?);
        let what = format!("{} is Ready", self.name);
        let ready = eventually(&what, SOON, async || {
            let beat = self.heartbeat().await?;
            ensure!(beat.is_some() && beat != before, "heard of at {beat:?}");
            Ok(())
        });
        if let Err(error) = ready.await {
            self.kubelet.as_mut().map_or(Ok(()), Child::check_running)?;
            return Err(error.context(self.place.log_tails(&[&log])));
        }
        Ok(())
    }

    /// Time of the kubelet's last heartbeat, if its Node is Ready. A condition's own time is too coarse: it's in
    /// seconds, and renewed every five minutes.
    async fn heartbeat(&self) -> Result<Option<String>> {
        let node = Api::<Node>::all(self.client.clone()).get_opt(&self.name).await?;
        let conditions = node.and_then(|node| node.status).and_then(|status| status.conditions);
        let mut conditions = conditions.into_iter().flatten();
        if !conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True") {
            return Ok(None);
        }
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), "kube-node-lease");
        let renewed = leases.get_opt(&self.name).await?.and_then(|lease| lease.spec?.renew_time);
        Ok(renewed.map(|time| time.0.to_string()))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.kill_kubelet();
        let _ = self.containerd.kill9();
        machine::end_machine(&mut self.machine);
    }
}

/// Reason why this machine can't run a worker, if any.
pub fn missing_for_worker() -> Option<String> {
    if let Err(error) = parts::kubernetes_program("kubelet") {
        return Some(format!("{error:#}"));
    }
    if !rustix::process::geteuid().is_root() {
        return Some("a kubelet needs root".to_owned());
    }
    for program in ["/usr/lib/cni/bridge", "/usr/sbin/runc"] {
        if !Path::new(program).exists() {
            return Some(format!("there is no {program}: run `make setup`"));
        }
    }
    // Every kubelet needs the memory controller; with cgroup v2 it's one of many files.
    let group =
        ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"].map(Path::new).into_iter().find(|path| path.is_dir());
    let Some(group) = group else { return Some("there are no control groups at /sys/fs/cgroup".to_owned()) };
    let probe = group.join(format!("prepull-{}", std::process::id()));
    let made = std::fs::create_dir(&probe).and_then(|()| std::fs::remove_dir(&probe));
    if let Err(error) = made {
        return Some(format!("no control group can be made in {}: {error}", group.display()));
    }
    let spaces = Command::new("unshare").args(["--mount", "--net", "--pid", "--fork", "true"]).output();
    match spaces {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(format!("no namespaces: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(error) => Some(format!("cannot start unshare: {error}")),
    }
}

/// Boots a machine. Returns the process that holds it, its first process, and its control group.
async fn boot(
    place: &Place,
    name: &str,
    space: &Space,
    dir: &Path,
    paths: &Paths,
) -> Result<(Child, u32, String)> {
    let mut command = Command::new("bash");
    command.arg(parts::setup_dir().join("kubelet-machine.sh")).arg(name).arg(space.name()).arg(dir);
    command.arg([paths.data, paths.run, paths.etc].join(":"));
    command.arg(parts::kubernetes_program("kubelet")?.parent().context("no directory")?);
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

/// Creates a disk for the images of a machine. It's removed with the place, which unmounts it.
async fn mount_disk(dir: &Path, size: u64) -> Result<()> {
    let (file, images) = (dir.join("disk"), dir.join(IMAGES));
    std::fs::create_dir_all(&images)?;
    File::create(&file)?.set_len(size)?;
    let mut make = Command::new("mkfs.ext4");
    make.arg("-q").arg(&file);
    parts::run_command(make).await?;
    let mut mount = Command::new("mount");
    mount.args(["-o", "loop"]).arg(&file).arg(&images);
    parts::run_command(mount).await.map(drop)
}

/// Settings of every kubelet here: its own control group and DNS, and no limits for this machine's disk.
fn kubelet_settings(group: &str, paths: &Paths) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": true}, "webhook": {"enabled": false}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs", "cgroupRoot": format!("/{group}"), "failCgroupV1": false,
        "containerRuntimeEndpoint": format!("unix://{}/containerd.sock", paths.run),
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "failSwapOn": false, "imageGCHighThresholdPercent": 100,
        "makeIPTablesUtilChains": false, "readOnlyPort": 0, "resolvConf": "",
    })
}
