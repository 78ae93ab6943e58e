{{/*
The chart has no manifests of its own: files/ leads to the folders that `kubectl apply -k` takes, and the templates below
read them by the part of kustomize's rules that these folders use.
*/}}

{{/*
Reads a folder, with the folders that its kustomization names. Arguments: folder, and read, which has `files`, `namespaces`
(what each of the manifests is called here), and takes `objects`, `maps` (generated ConfigMaps by name) and `patches`.
*/}}
{{- define "prepull.read" -}}
{{- $read := .read -}}
{{- $folder := .folder -}}
{{- $file := ternary "Kustomization" "kustomization.yaml" (eq .folder "crds") -}}
{{- $kustomization := include "prepull.file" (dict "read" $read "path" (printf "%s/%s" $folder $file)) | fromYaml -}}
{{- range $kustomization.resources -}}
  {{- $path := printf "%s/%s" $folder . | clean -}}
  {{- if hasSuffix ".yaml" . -}}
    {{- include "prepull.read.file" (dict "read" $read "path" $path) -}}
  {{- else -}}
    {{- include "prepull.read" (dict "read" $read "folder" $path) -}}
  {{- end -}}
{{- end -}}
{{- range $kustomization.configMapGenerator -}}
  {{- if not (hasKey $read.maps .name) -}}
    {{- $metadata := dict "name" .name "namespace" .namespace "labels" .options.labels -}}
    {{- $_ := set $read.maps .name (dict "apiVersion" "v1" "kind" "ConfigMap" "metadata" $metadata "data" dict) -}}
  {{- end -}}
  {{- $data := (get $read.maps .name).data -}}
  {{- range .literals -}}
    {{- $pair := splitn "=" 2 . -}}
    {{- $_ := set $data $pair._0 $pair._1 -}}
  {{- end -}}
  {{- range .files -}}
    {{- $_ := set $data . (include "prepull.file" (dict "read" $read "path" (printf "%s/%s" $folder .))) -}}
  {{- end -}}
{{- end -}}
{{- $_ := set $read "patches" (concat $read.patches ($kustomization.patches | default list)) -}}
{{- end -}}

{{/* Reads the objects of a file. Arguments: read, and path. */}}
{{- define "prepull.read.file" -}}
{{- $read := .read -}}
{{- range regexSplit "(?m)^---$" (include "prepull.file" .) -1 -}}
  {{- with fromYaml . -}}
    {{- $_ := set $read "objects" (append $read.objects .) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/* The text of a file, with the namespaces as they are called here. Arguments: read, and path. */}}
{{- define "prepull.file" -}}
{{- $text := .read.files.Get (printf "files/%s" .path) | required (printf "the chart lacks files/%s" .path) -}}
{{- /* By way of marks, so that no name of theirs is taken for one of ours. */ -}}
{{- $namespaces := .read.namespaces -}}
{{- $names := keys $namespaces | sortAlpha -}}
{{- range $index, $ours := $names -}}
  {{- $text = regexReplaceAll (printf `\b%s\b` $ours) $text (printf "@@%d@@" $index) -}}
{{- end -}}
{{- range $index, $ours := $names -}}
  {{- $text = replace (printf "@@%d@@" $index) (get $namespaces $ours) $text -}}
{{- end -}}
{{- $text -}}
{{- end -}}

{{/* A setting as text. Helm reads the numbers of a file as floats, and writes 2000000 as 2e+06. */}}
{{- define "prepull.setting" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) -}}
  {{- printf "%.0f" . -}}
{{- else -}}
  {{- toString . -}}
{{- end -}}
{{- end -}}

{{/* Applies the JSON patches to an object, and returns it as JSON. Arguments: object, patches. */}}
{{- define "prepull.patch" -}}
{{- $object := .object -}}
{{- range .patches -}}
  {{- if and (eq .target.kind $object.kind) (eq .target.name $object.metadata.name) -}}
    {{- range fromYamlArray .patch -}}
      {{- $keys := splitList "/" .path | rest -}}
      {{- $object = (include "prepull.operation" (dict "node" $object "keys" $keys "operation" .) | fromJson).node -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- toJson $object -}}
{{- end -}}

{{/* One operation of a JSON patch on a node, which is returned as JSON, as {"node": …}. Arguments: node, keys, operation. */}}
{{- define "prepull.operation" -}}
{{- $arguments := . -}}
{{- $key := first .keys -}}
{{- $rest := rest .keys -}}
{{- $op := .operation.op -}}
{{- $node := .node -}}
{{- if kindIs "map" $node -}}
  {{- if $rest -}}
    {{- $_ := set $node $key (include "prepull.operation" (dict "node" (get $node $key) "keys" $rest "operation" .operation) | fromJson).node -}}
  {{- else if eq $op "remove" -}}
    {{- $_ := unset $node $key -}}
  {{- else if eq $op "test" -}}
    {{- include "prepull.test" (dict "found" (get $node $key) "operation" .operation) -}}
  {{- else -}}
    {{- $_ := set $node $key .operation.value -}}
  {{- end -}}
{{- else -}}
  {{- $items := list -}}
  {{- range $index, $item := $node -}}
    {{- if ne (toString $index) $key -}}
      {{- $items = append $items $item -}}
    {{- else if $rest -}}
      {{- $items = append $items (include "prepull.operation" (dict "node" $item "keys" $rest "operation" $arguments.operation) | fromJson).node -}}
    {{- else if eq $op "replace" -}}
      {{- $items = append $items $arguments.operation.value -}}
    {{- else if ne $op "remove" -}}
      {{- fail (printf "the chart carries out no %s at %s" $op $arguments.operation.path) -}}
    {{- end -}}
  {{- end -}}
  {{- if and (eq $op "add") (eq $key "-") -}}
    {{- $items = append $items .operation.value -}}
  {{- end -}}
  {{- $node = $items -}}
{{- end -}}
{{- dict "node" $node | toJson -}}
{{- end -}}

{{- define "prepull.test" -}}
{{- if not (deepEqual .found .operation.value) -}}
  {{- fail (printf "%s is %v, and not %v" .operation.path .found .operation.value) -}}
{{- end -}}
{{- end -}}
