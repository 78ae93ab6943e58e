// Command kubernetes is every program of a small cluster in one: kube-apiserver, kube-controller-manager,
// kube-scheduler, kubelet and kubectl, chosen by the name that it's called by. Five programs of their own would be
// linked five times and hold most of Kubernetes five times.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	name := filepath.Base(os.Args[0])
	programs := map[string]func() *cobra.Command{
		"kube-apiserver":          apiserver.NewAPIServerCommand,
		"kube-controller-manager": manager.NewControllerManagerCommand,
		"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
		"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
		"kubectl":                 kubectl.NewDefaultKubectlCommand,
	}
	program, known := programs[name]
	if !known {
		fmt.Fprintf(os.Stderr, "%s: call it by the name of one of its programs, such as kubelet\n", name)
		os.Exit(2)
	}
	if name == "kubectl" {
		// What kubectl prints of an error depends on the error.
		if err := cli.RunNoErrOutput(program()); err != nil {
			util.CheckErr(err)
		}
		return
	}
	os.Exit(cli.Run(program()))
}
