{{- define "perdure.labels" -}}
app.kubernetes.io/name: perdure
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "perdure.metadata" -}}
name: {{ .root.Release.Name }}-{{ .component }}
labels:
  {{- include "perdure.labels" . | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "perdure.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}

{{/* The text of a setting. Helm itself prints a number of a file as 2e+07, and a list or a map as Go does. */}}
{{- define "perdure.text" -}}
{{- if kindIs "string" . }}{{ . }}{{ else if kindIs "invalid" . }}{{ else if kindIs "slice" . }}{{ join "," . }}{{ else }}{{ toJson . }}{{ end -}}
{{- end }}

{{/* The environment of a process: `secrets` are keys of existingSecret. Those of `required` must exist. */}}
{{- define "perdure.environment" -}}
env:
  - {name: PERDURE_DATABASE_SCHEMA, value: {{ .root.Values.schema | quote }}}
  {{- range .required }}
  - name: {{ . }}
    valueFrom: {secretKeyRef: {name: {{ $.root.Values.existingSecret }}, key: {{ . }}}}
  {{- end }}
  {{- range .secrets }}
  - name: {{ . }}
    valueFrom: {secretKeyRef: {name: {{ $.root.Values.existingSecret }}, key: {{ . }}, optional: true}}
  {{- end }}
  {{- range $name, $value := .root.Values.settings }}
  - {name: {{ $name }}, value: {{ include "perdure.text" $value | quote }}}
  {{- end }}
{{- end }}

{{/* What the pods of all processes have in common. */}}
{{- define "perdure.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
volumes:
  - {name: data, emptyDir: {}}
  - {name: tmp, emptyDir: {}}
{{- end }}

{{/* What all containers have in common. */}}
{{- define "perdure.container" -}}
image: {{ include "perdure.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: data, mountPath: /var/lib/perdure}
  - {name: tmp, mountPath: /tmp}
{{- end }}

{{/* A budget of disruptions, so that a drained node does not stop all pods of a component at once. */}}
{{- define "perdure.disruption" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "perdure.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .maxUnavailable }}
  selector:
    matchLabels:
      {{- include "perdure.labels" . | nindent 6 }}
{{- end }}
