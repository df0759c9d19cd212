// Helm for the tests, as far as they need it: lints a chart, and prints what it installs.
//
//	helm lint CHART [VALUES.yaml]
//	helm template CHART NAMESPACE [VALUES.yaml]
package main

import (
	"fmt"
	"os"
	"path"
	"sort"

	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
)

func main() {
	arguments := os.Args[1:]
	var err error
	switch {
	case len(arguments) >= 2 && len(arguments) <= 3 && arguments[0] == "lint":
		err = check(arguments[1], arguments[2:])
	case len(arguments) >= 3 && len(arguments) <= 4 && arguments[0] == "template":
		err = template(arguments[1], arguments[2], arguments[3:])
	default:
		err = fmt.Errorf("usage: helm (lint CHART | template CHART NAMESPACE) [VALUES.yaml]")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func values(files []string) (map[string]interface{}, error) {
	if len(files) == 0 {
		return map[string]interface{}{}, nil
	}
	return chartutil.ReadValuesFile(files[0])
}

// check fails at warnings as well: a chart of ours has none.
func check(folder string, files []string) error {
	given, err := values(files)
	if err != nil {
		return err
	}
	found := lint.AllWithKubeVersion(folder, given, "default", nil)
	for _, message := range found.Messages {
		if message.Severity > support.InfoSev {
			return message
		}
	}
	return nil
}

func template(folder, namespace string, files []string) error {
	given, err := values(files)
	if err != nil {
		return err
	}
	loaded, err := loader.Load(folder)
	if err != nil {
		return err
	}
	release := chartutil.ReleaseOptions{Name: "moejob", Namespace: namespace, IsInstall: true}
	// This is where the values meet their schema.
	all, err := chartutil.ToRenderValues(loaded, given, release, chartutil.DefaultCapabilities)
	if err != nil {
		return err
	}
	rendered, err := engine.Render(loaded, all)
	if err != nil {
		return err
	}
	print(loaded, rendered)
	return nil
}

func print(loaded *chart.Chart, rendered map[string]string) {
	for _, definition := range loaded.CRDObjects() {
		fmt.Printf("---\n%s\n", definition.File.Data)
	}
	names := make([]string, 0, len(rendered))
	for name := range rendered {
		if extension := path.Ext(name); extension == ".yaml" {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	for _, name := range names {
		fmt.Printf("---\n%s\n", rendered[name])
	}
}
