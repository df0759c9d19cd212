// Kubernetes and etcd as one program, for the tests: it is whichever component its name or its
// first argument says. One program links the code that all components share only once: a
// single file of some 140 MB, and a single build to cache.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	component := filepath.Base(os.Args[0])
	if !run(component) {
		if len(os.Args) < 2 {
			usage()
		}
		os.Args = os.Args[1:]
		if !run(os.Args[0]) {
			usage()
		}
	}
}

// run becomes the component, which ends the process, or answers false for a name it does not know.
func run(component string) bool {
	switch component {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kube-apiserver":
		serve(apiserver.NewAPIServerCommand())
	case "kube-controller-manager":
		serve(controllers.NewControllerManagerCommand())
	case "kube-scheduler":
		serve(scheduler.NewSchedulerCommand())
	case "kubelet":
		serve(kubelet.NewKubeletCommand(context.Background()))
	case "kubectl":
		if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
			util.CheckErr(err)
		}
		os.Exit(0)
	default:
		return false
	}
	return true
}

func serve(command *cobra.Command) {
	os.Exit(cli.Run(command))
}

func usage() {
	fmt.Fprintln(os.Stderr, "usage: kube (etcd | kube-apiserver | kube-controller-manager |"+
		" kube-scheduler | kubelet | kubectl) [arguments]")
	os.Exit(2)
}
