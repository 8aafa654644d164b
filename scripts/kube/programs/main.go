// SPDX-License-Identifier: Apache-2.0

// The programs of a Kubernetes control plane and node, and kubectl, linked into one file: they share most of their code,
// so that one file is a fifth of what six would be. The first argument says which of them this process is.
package main

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// Only the chosen command is made: making one registers flags and feature gates for the whole process, and two of them
// would register the same ones twice.
var makers = map[string]func() *cobra.Command{
	"apiserver":          apiserver.NewAPIServerCommand,
	"controller-manager": manager.NewControllerManagerCommand,
	"kubectl":            kubectl.NewDefaultKubectlCommand,
	"kubelet":            func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
	"proxy":              proxy.NewProxyCommand,
	"scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
}

func main() {
	var chosen string
	if len(os.Args) > 1 {
		chosen = os.Args[1]
	}
	makeCommand, known := makers[chosen]
	if !known {
		names := strings.Join(slices.Sorted(maps.Keys(makers)), ", ")
		fmt.Fprintf(os.Stderr, "kube: %q is none of its programs: %s\n", chosen, names)
		os.Exit(2)
	}
	os.Args = slices.Delete(os.Args, 0, 1)
	os.Exit(cli.Run(makeCommand()))
}
