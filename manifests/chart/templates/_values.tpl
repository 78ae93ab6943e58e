{{/* Sets what the values say of a workload. Arguments: object, values, settings (the ConfigMap of its containers), chart. */}}
{{- define "prepull.workload" -}}
{{- $values := .values -}}
{{- $template := .object.spec.template -}}
{{- $pod := $template.spec -}}
{{- $image := printf "%s:%s" $values.image.repository ($values.image.tag | default .chart.AppVersion) -}}
{{- if $values.image.digest }}{{ $image = printf "%s@%s" $values.image.repository $values.image.digest }}{{ end -}}
{{- range concat $pod.containers ($pod.initContainers | default list) -}}
  {{- $_ := set . "image" $image -}}
  {{- if $values.image.pullPolicy }}{{ $_ := set . "imagePullPolicy" $values.image.pullPolicy }}{{ end -}}
{{- end -}}
{{- $container := first $pod.containers -}}
{{- $_ := set $container "args" (concat $container.args $values.extraArgs) -}}
{{- if $values.resources }}{{ $_ := set $container "resources" $values.resources }}{{ end -}}
{{- range $field, $value := $values.podSpec }}{{ $_ := set $pod $field $value }}{{ end -}}
{{- /* A change of the settings replaces the pods. */ -}}
{{- $annotations := dict "checksum/settings" (toJson .settings.data | sha256sum) -}}
{{- $_ := set $template.metadata "annotations" (merge $annotations $values.podAnnotations) -}}
{{- end -}}

{{/* Sets what the values say of the Service for the edges. Arguments: object, values. */}}
{{- define "prepull.service" -}}
{{- $spec := .object.spec -}}
{{- $values := .values -}}
{{- if .values.annotations }}{{ $_ := set .object.metadata "annotations" .values.annotations }}{{ end -}}
{{- range $field, $value := .values.spec }}{{ $_ := set $spec $field $value }}{{ end -}}
{{- if eq $spec.type "ClusterIP" }}{{ $_ := unset $spec "externalTrafficPolicy" }}{{ end -}}
{{- range $spec.ports -}}
  {{- if get $values.nodePorts .name }}{{ $_ := set . "nodePort" (get $values.nodePorts .name | int) }}{{ end -}}
{{- end -}}
{{- end -}}
