{{- define "vcuda-quota.image" -}}
{{ .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end -}}

{{- define "vcuda-quota.scheduler-image" -}}
{{ .Values.scheduler.image | default (printf "registry.k8s.io/kube-scheduler:%s" .Capabilities.KubeVersion.Version) }}
{{- end -}}

{{- /* A Job cannot be changed, so that each upgrade has one of its own. */ -}}
{{- define "vcuda-quota.job-suffix" -}}
{{- if gt (int .Release.Revision) 1 }}-{{ .Release.Revision }}{{ end -}}
{{- end -}}

{{- define "vcuda-quota.proxy-labels" -}}
{{ .Values.page.proxy.podLabels | default (dict "app.kubernetes.io/name" "oauth2-proxy") | toYaml }}
{{- end -}}
