{{/* The image: a tag may be empty, a name, a digest, or a name and its digest. */}}
{{- define "moejob.image" -}}
{{- $tag := default .Chart.AppVersion .Values.image.tag -}}
{{- if hasPrefix "@" $tag -}}
{{ .Values.image.repository }}{{ $tag }}
{{- else -}}
{{ .Values.image.repository }}:{{ $tag }}
{{- end -}}
{{- end -}}
