//! Examples of Kruise's manual, word for word: YAML with its comments, commands, and their output.

/// ImagePullJob of the Chinese manual.
pub const JOB: &str = "apiVersion: apps.kruise.io/v1alpha1
kind: ImagePullJob
metadata:
  name: job-with-always
spec:
  image: nginx:1.9.1   # [required] 完整的镜像名 name:tag
  parallelism: 10      # [optional] 最大并发拉取的节点梳理, 默认为 1
  selector:            # [optional] 指定节点的 名字列表 或 标签选择器 (只能设置其中一种)
    names:
    - node-1
    - node-2
    matchLabels:
      node-type: xxx
# podSelector:         # [optional] 通过 podSelector 匹配Pod，在这些 Pod 所在节点上拉取镜像, 与 selector 不能同时设置.
#   matchLabels:
#     pod-label: xxx
#   matchExpressions:
#   - key: pod-label
#      operator: In
#        values:
#        - xxx
  completionPolicy:
    type: Always                  # [optional] 默认为 Always
    activeDeadlineSeconds: 1200   # [optional] 无默认值, 只对 Always 类型生效
    ttlSecondsAfterFinished: 300  # [optional] 无默认值, 只对 Always 类型生效
  pullPolicy:                     # [optional] 默认 backoffLimit=3, timeoutSeconds=600
    backoffLimit: 3
    timeoutSeconds: 300
";

/// ImagePullJob of the English manual.
pub const JOB_IN_ENGLISH: &str = "apiVersion: apps.kruise.io/v1alpha1
kind: ImagePullJob
metadata:
  name: job-with-always
spec:
  image: nginx:1.9.1   # [required] image to pull
  parallelism: 10      # [optional] the maximal number of Nodes that pull this image at the same time, defaults to 1
  selector:            # [optional] the names or label selector to assign Nodes (only one of them can be set)
    names:
    - node-1
    - node-2
    matchLabels:
      node-type: xxx
  # podSelector:         # [optional] label selector over pods that should pull image on nodes of these pods. Mutually exclusive with selector.
  #  pod-label: xxx
  completionPolicy:
    type: Always                  # [optional] defaults to Always
    activeDeadlineSeconds: 1200   # [optional] no default, only work for Alway type
    ttlSecondsAfterFinished: 300  # [optional] no default, only work for Alway type
  pullPolicy:                     # [optional] defaults to backoffLimit=3, timeoutSeconds=600
    backoffLimit: 3
    timeoutSeconds: 300
";

/// ImageListPullJob of both manuals.
pub const LIST: &str = "apiVersion: apps.kruise.io/v1alpha1
kind: ImageListPullJob
metadata:
  name: job-with-always
spec:
  images:
  - nginx:1.9.1   # [required] image to pull
  - busybox:1.29.2
  - ...
  parallelism: 10      # [optional] the maximal number of Nodes that pull this image at the same time, defaults to 1
  selector:            # [optional] the names or label selector to assign Nodes (only one of them can be set)
    names:
    - node-1
    - node-2
    matchLabels:
      node-type: xxx
  completionPolicy:
    type: Always                  # [optional] defaults to Always
    activeDeadlineSeconds: 1200   # [optional] no default, only work for Always type
    ttlSecondsAfterFinished: 300  # [optional] no default, only work for Always type
  pullPolicy:                     # [optional] defaults to backoffLimit=3, timeoutSeconds=600
    backoffLimit: 3
    timeoutSeconds: 300
";

/// Fragment of a job with secrets.
pub const SECRETS: &str = "# ...
spec:
  pullSecrets:
  - secret-name1
  - secret-name2
";

/// Fragment of a job with metadata for the container runtime.
pub const SANDBOX: &str = r#"apiVersion: apps.kruise.io/v1alpha1
kind: ImagePullJob
spec:
  ...
  image: nginx:1.9.1
  sandboxConfig:
    annotations:
      io.kubernetes.image.metrics.tags: "cluster=cn-shanghai"
    labels:
      io.kubernetes.image.app: "foo"
"#;

/// Fragment of a job with a pull policy.
pub const POLICY: &str = "apiVersion: apps.kruise.io/v1alpha1
kind: ImagePullJob
spec:
  ...
  image: nginx:1.9.1
  imagePullPolicy: Always | IfNotPresent
";

/// A NodeImage without images.
pub const EMPTY_NODE_IMAGE: &str = "apiVersion: apps.kruise.io/v1alpha1
kind: NodeImage
metadata:
  labels:
    kubernetes.io/arch: amd64
    kubernetes.io/os: linux
    # ...
  name: node-xxx
  # ...
spec: {}
status:
  desired: 0
  failed: 0
  pulling: 0
  succeeded: 0
";

/// Spec to write into a NodeImage.
pub const EDITED: &str = "# ...
spec:
  images:
    ubuntu:  # 镜像 name
      tags:
      - tag: latest  # 镜像 tag
        pullPolicy:
          ttlSecondsAfterFinished: 300  # [required] 拉取完成（成功或失败）超过 300s 后，将这个任务从 NodeImage 中清除
          timeoutSeconds: 600           # [optional] 每一次拉取的超时时间, 默认为 600
          backoffLimit: 3               # [optional] 拉取的重试次数，默认为 3
          activeDeadlineSeconds: 1200   # [optional] 整个任务的超时时间，无默认值
";

/// Command that opens a NodeImage in an editor.
pub const EDIT: &str = "kubectl edit nodeimage node-xxx";
/// Command that changes a NodeImage without an editor.
pub const PATCH: &str = r#"kubectl patch nodeimage node-xxx --type=merge -p '{"spec":{"images":{"ubuntu":{"tags":[{"tag":"latest","pullPolicy":{"ttlSecondsAfterFinished":300}}]}}}}'"#;
/// Command that shows a NodeImage.
pub const READ: &str = "kubectl get nodeimage node-xxx -o yaml";

/// Commands of the FAQ, each with its output.
pub const FAQ: [(&str, &str); 3] = [
    (
        "kubectl get imagepulljob",
        "NAME              TOTAL   ACTIVE   SUCCEED   FAILED   AGE     MESSAGE
job-with-always   4       0        0         4        9m49s   job has completed
",
    ),
    (
        "kubectl get imagepulljob job-with-always -oyaml",
        r#"apiVersion: apps.kruise.io/v1alpha1
kind: ImagePullJob
status:
  active: 0
  completionTime: "2024-08-09T10:06:26Z"
  desired: 4
  failed: 4
  failedNodes:
  - cn-hangzhou.x.125
  - cn-hangzhou.x.126
  - cn-hangzhou.x.127
  - cn-hangzhou.x.128
  message: job has completed
  startTime: "2024-08-09T10:03:52Z"
  succeeded: 0
"#,
    ),
    (
        "kubectl get nodeimage cn-hangzhou.x.125 -oyaml",
        r#"apiVersion: apps.kruise.io/v1alpha1
kind: NodeImage
status:
  desired: 1
  failed: 1
  imageStatuses:
    nginx:
      tags:
      - completionTime: "2024-08-09T10:06:22Z"
        message: 'Failed to pull image reference "nginx:1.9.1": rpc error: code =
          DeadlineExceeded desc = failed to pull and unpack image "docker.io/library/nginx:1.9.1":
          failed to copy: httpReadSeeker: failed open: failed to do request: Get "https://production.cloudflare.docker.com/registry-v2/docker/registry/v2/blobs/sha256/c5/c5dd085dcc7c78a296c80b87916831fd19a3f447d94b99580ccd19a052720211/data?verify=1723200943-x6RCoD1a2P3aEdh1%!B(MISSING)XcQSFe2h%!B(MISSING)U%!D(MISSING)":
          dial tcp 10.1.1.1:443: i/o timeout'
        phase: Failed
        startTime: "2024-08-09T10:03:52Z"
        tag: 1.9.1
  pulling: 0
  succeeded: 0
"#,
    ),
];
