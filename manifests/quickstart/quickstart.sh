#!/usr/bin/env bash
# From a cluster to a Completed job, and a pod that starts without its registry. docs/quickstart.md explains each step.
#
#   quickstart.sh --kind              on a new cluster of kind, with the images of `make dist`
#   quickstart.sh --k3d               the same with k3d
#   quickstart.sh --registry NAME     on the cluster of your kubeconfig, with both images at NAME/<program>
#   quickstart.sh --clean …           removes all that it has made; with --kind or --k3d the whole cluster
#
#   --context NAME        the cluster of this context
#   --node NAME           the edge node. Without it, the first Ready one that has the label of edge nodes
#   --image IMAGE         what is pulled ahead; it must run without arguments (default: nginx:1.25)
#   --advertise ADDRESS   where the agent reaches cloudcore-prepull (default: the ClusterIP of its Service)
#   --set NAME=VALUE      a setting of the agent, as in `edgecore-prepull run --help`; may be repeated
#   --dist DIR            what `make dist` has made (default: target/dist)
#
# It may be run again at any time, with the same arguments: what is there stays as it is.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
settings=$here/settings
mark=prepull.kubeedge.io/quickstart
edge_label='node-role.kubernetes.io/edge'
tag=0.1.0
cluster_name=prepull

cluster='' clean='' context='' node='' registry='' advertise='' runtime='' image=nginx:1.25
dist=$here/../../target/dist
agent_settings=() stays=()

die() { printf 'quickstart: %s\n' "$*" >&2 && exit 1; }
step() { printf '\n==> %s\n' "$*"; }
waits() { printf '    waits for: %s\n' "$*"; }
# Prints a command as it could be typed, and runs it.
run() {
  local shown
  shown=$(printf ' %q' "$@")
  printf '$%s\n' "$shown"
  "$@"
}
value() { [[ $# -ge 2 && -n $2 ]] || die "$1 needs a value"; }

while (($#)); do
  case $1 in
    --kind | --k3d) cluster=${1#--} ;;
    --clean) clean=yes ;;
    --context) value "$@" && context=$2 && shift ;;
    --node) value "$@" && node=$2 && shift ;;
    --image) value "$@" && image=$2 && shift ;;
    --registry) value "$@" && registry=$2 && shift ;;
    --advertise) value "$@" && advertise=$2 && shift ;;
    --dist) value "$@" && dist=$2 && shift ;;
    --set) value "$@" && agent_settings+=("$2") && shift ;;
    --help | -h) sed -n '2,/^set -/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    *) die "unknown argument $1; --help lists them" ;;
  esac
  shift
done
[[ -z $cluster || -z $context ]] || die "--$cluster has a context of its own: leave --context out"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM HUP

needs() { # PROGRAM REMEDY
  command -v "$1" >/dev/null || die "$1 is missing: $2"
}

# The kubeconfig for all that follows, so that each command is the same for every cluster.
use_context() { # NAME
  kubectl config view --raw --minify --flatten --context "$1" >"$scratch/kubeconfig" ||
    die "the kubeconfig has no context $1: \`kubectl config get-contexts\` lists them"
  export KUBECONFIG=$scratch/kubeconfig
}

# ---- A cluster of our own ----

cluster_exists() {
  case $cluster in
    kind) kind get clusters 2>/dev/null | grep -qx "$cluster_name" ;;
    k3d) k3d cluster get "$cluster_name" >/dev/null 2>&1 ;;
  esac
}

containers() { # the containers that are nodes
  case $cluster in
    kind) kind get nodes --name "$cluster_name" ;;
    k3d) printf '%s\n' "k3d-$cluster_name-server-0" "k3d-$cluster_name-agent-0" ;;
  esac
}

make_cluster() {
  local program container
  for program in cloudcore-prepull edgecore-prepull; do
    [[ -r $dist/$program-image.tar ]] ||
      die "$dist has no $program-image.tar: \`make dist\` makes it, and --dist names another directory"
  done
  step "a cluster: $cluster, $cluster_name"
  if cluster_exists; then
    echo "    it is there"
  elif [[ $cluster == kind ]]; then
    waits "its nodes are Ready"
    run kind create cluster --name "$cluster_name" --config "$here/kind.yaml" --wait 3m
  else
    waits "its nodes are Ready"
    run k3d cluster create "$cluster_name" --agents 1 --wait
  fi
  step "our images, onto its nodes: there is no registry that has them"
  for container in $(containers); do
    for program in cloudcore-prepull edgecore-prepull; do
      # The archives name the version alone.
      printf '$ docker exec --interactive %s ctr … images import - <%s\n' "$container" "$program-image.tar"
      docker exec --interactive "$container" ctr --namespace k8s.io images import \
        --base-name "docker.io/library/$program" - <"$dist/$program-image.tar"
    done
  done
}

# ---- What is applied ----

# Settings beside the manifests, as an operator would write them.
write_settings() { # ADDRESS
  local image_of='' line
  mkdir -p "$settings"/{address,cloud,edge}
  cp "$here"/../cloudcore-prepull/{namespace,service}.yaml "$settings/address"
  cat >"$settings/address/kustomization.yaml" <<END
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [namespace.yaml, service.yaml]
commonAnnotations: {$mark: "true"}
END
  [[ -z $registry ]] || image_of=$registry/
  cat >"$settings/cloud/kustomization.yaml" <<END
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../../../crds, ../../../cloudcore-prepull]
components: [../../../components/one-replica]
commonAnnotations: {$mark: "true"}
images:
  - {name: cloudcore-prepull, newName: "${image_of}cloudcore-prepull", newTag: $tag}
configMapGenerator:
  - name: cloudcore-prepull-settings
    namespace: prepull-system
    behavior: merge
    literals: ["PREPULL_ADVERTISE=$1"]
END
  cat >"$settings/edge/kustomization.yaml" <<END
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../../../edgecore-prepull]
commonAnnotations: {$mark: "true"}
images:
  - {name: edgecore-prepull, newName: "${image_of}edgecore-prepull", newTag: $tag}
configMapGenerator:
  - name: edgecore-prepull
    namespace: prepull-edge
    behavior: merge
    literals:
      - "PREPULL_SERVER=$1"
END
  for line in ${agent_settings[@]+"${agent_settings[@]}"}; do
    printf '      - "%s"\n' "$line" >>"$settings/edge/kustomization.yaml"
  done
  [[ -z $runtime ]] ||
    printf 'components: [../../../edgecore-prepull/runtimes/%s]\n' "$runtime" >>"$settings/edge/kustomization.yaml"
}

# Whether an object exists, and whether this script has made it.
exists() { [[ -n $(kubectl get "$1" "$2" --ignore-not-found --output name) ]]; }
is_ours() {
  [[ $(kubectl get "$@" --ignore-not-found --output yaml) == *"$mark: \"true\""* ]]
}
definition=imageprepulljobs.operations.kubeedge.io
refuse_foreign() {
  local kind name
  while read -r kind name; do
    if exists "$kind" "$name" && ! is_ours "$kind" "$name"; then
      die "the cluster has the $kind $name, and the quickstart didn't make it: use a cluster without an installation" \
        "(docs/operations/install.md is about one that stays, docs/kubeedge.md about KubeEdge's)"
    fi
  done <<END
namespace prepull-system
namespace prepull-edge
customresourcedefinition $definition
END
}

# Ready nodes with this selector, each in a line.
ready_nodes() { # SELECTOR…
  kubectl get nodes "$@" --output \
    'jsonpath={range .items[*]}{.metadata.name}{" "}{.status.conditions[?(@.type=="Ready")].status}{" "}{.spec.unschedulable}{"\n"}{end}' |
    awk '$2 == "True" && $3 != "true" {print $1}'
}

choose_node() {
  local ready others
  ready=$(ready_nodes)
  [[ -n $ready ]] || die "no node of the cluster is Ready: \`kubectl get nodes\`"
  if [[ -z $node ]]; then
    node=$(ready_nodes --selector "$edge_label" | head -1)
    # In a cluster of our own the last worker plays the edge.
    [[ -n $node || -z $cluster ]] || node=$(grep -E 'worker|agent' <<<"$ready" | tail -1)
  fi
  [[ -n $node ]] || die "no Ready node has the label $edge_label: name one with --node, of ${ready//$'\n'/, }"
  grep -qxF "$node" <<<"$ready" || die "the node $node is not Ready: \`kubectl describe node $node\`"
  others=$(ready_nodes --selector "!$edge_label" | grep -vxF "$node" || true)
  [[ -n $others ]] || die "cloudcore-prepull doesn't run on an edge node: the cluster needs a Ready node beside $node"
}

find_runtime() {
  local versions
  versions=$(kubectl get node "$node" --output 'jsonpath={.status.nodeInfo.kubeletVersion} {.status.nodeInfo.containerRuntimeVersion}')
  case $versions in
    *+k3s*) runtime=k3s ;;
    *+rke2*) runtime=rke2 ;;
    *+k0s*) runtime=k0s ;;
    *cri-o://*) runtime=crio ;;
    *docker://*) runtime=cri-dockerd ;;
    *) runtime='' ;;
  esac
}

# Waits for a rollout; if it doesn't end, prints what is in its way.
rolls_out() { # NAMESPACE OBJECT
  run kubectl --namespace "$1" rollout status "$2" --timeout 3m || {
    kubectl --namespace "$1" get pods --output wide
    kubectl --namespace "$1" get events --field-selector type=Warning | tail -5
    die "$2 is not rolled out; the lines above have the reason"
  }
}

# ---- The steps ----

install_cloud() {
  step "cloudcore-prepull: where the agent will reach it"
  write_settings "${advertise:-unknown}"
  run kubectl apply -k "$settings/address"
  if [[ -z $advertise ]]; then
    # Nodes reach it, and so does the agent, which uses the network of its node.
    advertise=$(kubectl --namespace prepull-system get service cloudcore-prepull --output 'jsonpath={.spec.clusterIP}')
    write_settings "$advertise"
  fi
  echo "    $advertise, ports 10000 and 10002"
  step "cloudcore-prepull: definitions, rights, Deployment"
  waits "its pod is ready, 3 minutes at most"
  run kubectl apply -k "$settings/cloud"
  rolls_out prepull-system deployment/cloudcore-prepull
}

install_edge() {
  local has ready
  step "the node $node"
  has=$(kubectl get node "$node" --output 'jsonpath={.metadata.labels}')
  if [[ $has == *"\"$edge_label\""* ]]; then
    echo "    it has the label of edge nodes"
  else
    # Marked first: --clean takes away no label that was there before.
    run kubectl annotate node "$node" "$mark=true" --overwrite
    run kubectl label node "$node" "$edge_label="
  fi
  step "edgecore-prepull on each edge node, with a token to join"
  waits "the agent is connected, 3 minutes at most"
  run kubectl apply -k "$settings/edge"
  ready=$(kubectl --namespace prepull-edge get pods --field-selector "spec.nodeName=$node" \
    --output 'jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}')
  if [[ $ready != True ]]; then
    kubectl --namespace prepull-edge delete secret edgecore-prepull-join --ignore-not-found
    # Through a pipe: a token in an argument could be read by every user of this machine.
    cat <<'END'
$ kubectl --namespace prepull-system exec deploy/cloudcore-prepull -- cloudcore-prepull token create --ttl 1h |
    kubectl --namespace prepull-edge create secret generic edgecore-prepull-join --from-file token=/dev/stdin
END
    kubectl --namespace prepull-system exec deploy/cloudcore-prepull -- cloudcore-prepull token create --ttl 1h \
      2>"$scratch/said" | kubectl --namespace prepull-edge create secret generic edgecore-prepull-join --from-file token=/dev/stdin ||
      { cat "$scratch/said" >&2 && die "no token was made"; }
  fi
  rolls_out prepull-edge daemonset/edgecore-prepull
}

pull_ahead() {
  step "a job: $image, ahead of its pods"
  waits "the job is Completed, 5 minutes at most"
  run kubectl prepull run "$image" --name quickstart --node "$node" --wait=5m ||
    die "the job is not Completed: \`kubectl prepull why $node quickstart\` has the reason"
}

start_pod() {
  step "a pod of $image that must not pull"
  waits "the pod is Ready, a minute at most"
  cat >"$settings/pod.yaml" <<END
apiVersion: v1
kind: Pod
metadata:
  name: quickstart
  namespace: default
  annotations: {$mark: "true"}
spec:
  nodeName: $node
  terminationGracePeriodSeconds: 0
  containers:
    - name: app
      image: $image
      imagePullPolicy: Never    # the registry isn't asked: the image is there, or the pod doesn't start
END
  run kubectl apply -f "$settings/pod.yaml"
  run kubectl wait --for=condition=Ready pod/quickstart --namespace default --timeout 1m || {
    kubectl --namespace default describe pod quickstart | tail -15
    die "the pod doesn't start; the lines above have the reason"
  }
  run kubectl get pod quickstart --namespace default --output wide
}

# ---- And back ----

# The agent's certificate is on the node, in a directory that outlives its pods.
forget() { # NODE
  printf '    the certificate on node %s\n' "$1"
  kubectl --namespace prepull-edge delete pod quickstart-forgets --ignore-not-found >/dev/null
  cat >"$scratch/forgets.yaml" <<END
apiVersion: v1
kind: Pod
metadata: {name: quickstart-forgets, namespace: prepull-edge}
spec:
  nodeName: $1
  restartPolicy: OnFailure
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 0
  containers:
    - name: agent
      image: "$2"
      imagePullPolicy: IfNotPresent
      args: [uninstall]
      securityContext: {runAsUser: 0}
      volumeMounts: [{name: state, mountPath: /var/lib}]
  volumes: [{name: state, hostPath: {path: /var/lib, type: Directory}}]
END
  kubectl apply -f "$scratch/forgets.yaml"
  kubectl --namespace prepull-edge wait --for=jsonpath='{.status.phase}'=Succeeded pod/quickstart-forgets --timeout 1m || {
    kubectl --namespace prepull-edge logs quickstart-forgets || true
    stays+=("$1")
  }
}

clean_up() {
  local agent marked name nodes
  refuse_foreign
  step "the pod and the job"
  if is_ours pod quickstart --namespace default; then
    run kubectl delete pod quickstart --namespace default
  fi
  if exists customresourcedefinition "$definition"; then
    run kubectl delete imageprepulljob.operations.kubeedge.io quickstart --ignore-not-found
  fi
  if exists namespace prepull-edge; then
    step "the agent"
    nodes=$(kubectl --namespace prepull-edge get pods --selector app.kubernetes.io/name=edgecore-prepull \
      --output 'jsonpath={range .items[*]}{.spec.nodeName}{"\n"}{end}')
    agent=$(kubectl --namespace prepull-edge get daemonset edgecore-prepull --ignore-not-found \
      --output 'jsonpath={.spec.template.spec.containers[0].image}')
    run kubectl --namespace prepull-edge delete daemonset edgecore-prepull --ignore-not-found --cascade=foreground
    for name in $nodes; do forget "$name" "$agent"; done
  fi
  step "all objects"
  waits "both namespaces are gone"
  write_settings unknown
  run kubectl delete -k "$settings/edge" --ignore-not-found
  run kubectl delete -k "$settings/cloud" --ignore-not-found
  marked=$(kubectl get nodes --output "jsonpath={range .items[?(@.metadata.annotations.prepull\.kubeedge\.io/quickstart==\"true\")]}{.metadata.name}{\"\n\"}{end}")
  for name in $marked; do
    run kubectl label node "$name" "$edge_label-"
    run kubectl annotate node "$name" "$mark-"
  done
  rm -rf "$settings"
  ((${#stays[@]} == 0)) || die "/var/lib/edgecore-prepull stays on ${stays[*]}: remove it there by hand"
  step "nothing is left of the quickstart, but the image that was pulled"
}

needs kubectl "https://kubernetes.io/docs/tasks/tools/"
if [[ -n $cluster ]]; then
  needs docker "$cluster runs its nodes in it"
  needs "$cluster" "https://kind.sigs.k8s.io or https://k3d.io"
fi
if [[ -n $clean && -n $cluster ]]; then
  case $cluster in
    kind) run kind delete cluster --name "$cluster_name" ;;
    k3d) run k3d cluster delete "$cluster_name" ;;
  esac
  rm -rf "$settings"
  exit
fi
if [[ -z $clean ]]; then
  command -v kubectl-prepull >/dev/null || die "the plugin kubectl-prepull is not in the PATH: \`install" \
    "$dist/kubectl-prepull-linux-amd64 /usr/local/bin/kubectl-prepull\` (-arm64 where uname -m prints aarch64)"
  [[ -n $cluster || -n $registry ]] || die "name the registry that has both images with --registry, or let me make a" \
    "cluster with --kind or --k3d"
fi
[[ -z $cluster ]] || make_cluster
case $cluster in
  kind) use_context "kind-$cluster_name" ;;
  k3d) use_context "k3d-$cluster_name" ;;
  *) [[ -z $context ]] || use_context "$context" ;;
esac
kubectl version >"$scratch/version" 2>&1 || { cat "$scratch/version" >&2 && die "no cluster answers: --context, or KUBECONFIG"; }
if [[ -n $clean ]]; then
  clean_up
  exit
fi
refuse_foreign
choose_node
find_runtime
install_cloud
install_edge
pull_ahead
start_pod
step "done after $SECONDS s: the job is Completed, and the pod has started without the registry"
echo "    quickstart.sh --clean … removes it all"
